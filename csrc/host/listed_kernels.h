// The names and tiles of all kernels, for those who ask what the library has.
#pragma once

#include <vector>

#include "host/kernel_table.h"

namespace fastattn {

struct ListedKernel {
    const char* name;
    TileFacts tile;
};

// Returns them in the order in which they were added.
const std::vector<ListedKernel>& listed_kernels();

}  // namespace fastattn
