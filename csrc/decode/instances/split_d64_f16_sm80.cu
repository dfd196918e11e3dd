#include "decode/split_sm80.cuh"

namespace fastattn {

template void launch_decode_split_sm80<64, DataType::kFloat16, false>(const DecodeParams&, Stream);

}  // namespace fastattn
