#include "decode/combine_sm80.cuh"

namespace fastattn {

template void launch_decode_combine_sm80<DataType::kBFloat16>(const DecodeParams&, Stream);

}  // namespace fastattn
