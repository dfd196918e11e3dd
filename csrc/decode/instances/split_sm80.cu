// Instantiates flash-decoding for FASTATTN_HEAD_DIM, the list FASTATTN_BLOCK_M and the cache format FASTATTN_CACHE.
#include "decode/split_sm80.cuh"

namespace fastattn {

static const Registrations registrations(Values<FASTATTN_BLOCK_M>{}, [](auto dtype, auto value) {
    constexpr DataType kDataType = dtype;
    constexpr int32_t kRows = value;
    constexpr CacheFormat kFormat = CacheFormat::FASTATTN_CACHE;
    using Config = DecodeConfigSm80<kRows, FASTATTN_HEAD_DIM, kFormat>;
    decode_split_kernels(kFormat).add(
        KernelKey{80, FASTATTN_HEAD_DIM, kDataType, /*flag=*/kRows > kFewRows,
                  static_cast<int32_t>(bytes_needed<Config>())},
        kernel_name("decode_split_sm80", {FASTATTN_HEAD_DIM, kDataType, name_of(kFormat),
                                          kRows > kFewRows ? NameArgument(kRows, " rows") : ""}),
        tile_facts<typename Config::Tile>(), launch_decode_split_sm80<FASTATTN_HEAD_DIM, kDataType, kFormat, kRows>);
});

}  // namespace fastattn
