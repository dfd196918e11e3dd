#include "decode/split_sm80.cuh"

namespace fastattn {

template void launch_decode_split_sm80<128, DataType::kBFloat16, false>(const DecodeParams&, Stream);

}  // namespace fastattn
