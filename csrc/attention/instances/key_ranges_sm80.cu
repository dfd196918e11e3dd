// The kernel that lists the key tiles that rows see through ranges of keys.
#include "attention/key_ranges_sm80.cuh"

namespace fastattn {

static const Registration registration(attention_key_ranges_kernels(), KernelKey{80, 0, std::nullopt, false},
                                       kernel_name("attention_key_ranges_sm80", {}), TileFacts{},
                                       launch_attention_key_ranges_sm80);

}  // namespace fastattn
