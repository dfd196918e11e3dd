// The append by slots; compiled with FASTATTN_HEAD_DIM and FASTATTN_INT8, which says what the cache holds.
#include "decode/append_sm80.cuh"

namespace fastattn {

static const Registrations registrations([](auto dtype) {
    constexpr DataType kDataType = dtype;
    decode_append_kernels().add(KernelKey{80, FASTATTN_HEAD_DIM, kDataType, FASTATTN_INT8},
                                kernel_name("decode_append_sm80", {std::to_string(FASTATTN_HEAD_DIM),
                                                                   to_string(kDataType), FASTATTN_INT8 ? "int8" : ""}),
                                TileFacts{}, launch_decode_append_sm80<FASTATTN_HEAD_DIM, kDataType, FASTATTN_INT8>);
});

}  // namespace fastattn
