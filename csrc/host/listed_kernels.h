// The names and tiles of all kernels of the library.
#pragma once

#include <vector>

#include "host/kernel_table.h"

namespace fastattn {

struct ListedKernel {
    const char* name;
    TileFacts tile;
};

// Returns all kernels in the order in which they were added.
const std::vector<ListedKernel>& listed_kernels();

}  // namespace fastattn
