#include "decode/split_sm80.cuh"

namespace fastattn {

template void launch_decode_split_sm80<256, DataType::kBFloat16, true>(const DecodeParams&, Stream);

}  // namespace fastattn
