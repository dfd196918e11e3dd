#include "host/kernel_table.h"

#include <stdexcept>
#include <string>

#include "host/listed_kernels.h"

namespace fastattn {
namespace {

// Static initialisers fill the tables while the library is loaded, in no certain order. The first of them creates this
// list.
std::vector<ListedKernel>& all_kernels() {
    static auto& list = *new std::vector<ListedKernel>;
    return list;
}

std::string to_string(const KernelSize& size) {
    const std::string first = std::to_string(size.head_dim);
    return size.value_dim == size.head_dim ? first : first + ", " + std::to_string(size.value_dim);
}

}  // namespace

const char* kernel_name(const char* kernel, std::initializer_list<NameArgument> arguments) {
    std::string list;
    for (const NameArgument& argument : arguments) {
        const std::string text = (argument.size.head_dim > 0 ? to_string(argument.size) : "") + argument.word;
        if (!text.empty()) list += (list.empty() ? "" : ", ") + text;
    }
    return (new std::string(list.empty() ? kernel : kernel + ('<' + list + '>')))->c_str();
}

void list_kernel(const char* name, const TileFacts& tile) {
    all_kernels().push_back({name, tile});
}

const std::vector<ListedKernel>& listed_kernels() {
    return all_kernels();
}

void throw_no_kernel(const char* operation, const KernelSize& size, std::optional<DataType> dtype,
                     int32_t compute_capability) {
    throw std::runtime_error("fastattn: no kernel of " + std::string(operation) + " for size " + to_string(size) +
                             (dtype ? std::string(" and ") + to_string(*dtype) : "") +
                             " runs on a GPU of compute capability " + std::to_string(compute_capability / 10) + '.' +
                             std::to_string(compute_capability % 10));
}

}  // namespace fastattn
