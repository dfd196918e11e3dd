// The table from opcodes to families. An opcode that is not here is an error.
#include <algorithm>

#include "control.h"
#include "families.h"

namespace emulator {
namespace {

// add, sub, mul, …: the type, which is the last modifier, determines the family.
void decode_arithmetic(Decoder& d) {
    if (d.accept("cc")) return decode_extended(d, true);
    const Type type = d.require_type();
    if (is_integer(type) || is_integer_pair(type)) return decode_integer(d, type);
    if (type == Type::kF32 || type == Type::kF64) return decode_float(d, type);
    if (is_packed(type) || type == Type::kF16 || type == Type::kBF16) return decode_half(d, type);
    d.fail("unknown for this type");
}

constexpr Family kFamilies[] = {
    {"abs", decode_arithmetic},
    {"activemask", decode_activemask},
    {"add", decode_arithmetic},
    {"addc", decode_carry},
    {"and", decode_logic},
    {"atom", decode_atom},
    {"bar", decode_barrier},
    {"barrier", decode_barrier},
    {"bfe", decode_bit_field},
    {"bfi", decode_bit_field},
    {"bfind", decode_count_bits},
    {"bmsk", decode_bit_mask},
    {"bra", decode_branch},
    {"brev", decode_count_bits},
    {"brx", decode_branch_indexed},
    {"call", decode_call},
    {"clz", decode_count_bits},
    {"copysign", decode_arithmetic},
    {"cos", decode_approximate},
    {"cp", decode_cp},
    {"createpolicy", decode_createpolicy},
    {"cvt", decode_cvt},
    {"cvta", decode_cvta},
    {"div", decode_arithmetic},
    {"dp4a", decode_dot},
    {"elect", decode_elect},
    {"ex2", decode_approximate},
    {"exit", decode_exit},
    {"fence", decode_fence},
    {"fma", decode_arithmetic},
    {"getctarank", decode_getctarank},
    {"griddepcontrol", decode_griddepcontrol},
    {"isspacep", decode_isspacep},
    {"ld", decode_ld},
    {"ldmatrix", decode_ldmatrix},
    {"lg2", decode_approximate},
    {"lop3", decode_lop3},
    {"mad", decode_arithmetic},
    {"madc", decode_carry},
    {"mapa", decode_mapa},
    {"match", decode_match},
    {"max", decode_arithmetic},
    {"mbarrier", decode_mbarrier},
    {"membar", decode_fence},
    {"min", decode_arithmetic},
    {"mma", decode_mma},
    {"mov", decode_mov},
    {"mul", decode_arithmetic},
    {"nanosleep", decode_nanosleep},
    {"neg", decode_arithmetic},
    {"not", decode_logic},
    {"or", decode_logic},
    {"popc", decode_count_bits},
    {"prefetch", decode_prefetch},
    {"prefetchu", decode_prefetch},
    {"prmt", decode_prmt},
    {"rcp", decode_approximate},
    {"red", decode_atom},
    {"redux", decode_redux},
    {"rem", decode_arithmetic},
    {"ret", decode_return},
    {"rsqrt", decode_approximate},
    {"sad", decode_sad},
    {"selp", decode_selp},
    {"set", decode_set},
    {"setmaxnreg", decode_setmaxnreg},
    {"setp", decode_setp},
    {"shf", decode_funnel_shift},
    {"shfl", decode_shfl},
    {"shl", decode_shift},
    {"shr", decode_shift},
    {"sin", decode_approximate},
    {"sqrt", decode_approximate},
    {"st", decode_st},
    {"stmatrix", decode_stmatrix},
    {"sub", decode_arithmetic},
    {"subc", decode_carry},
    {"szext", decode_bit_mask},
    {"tanh", decode_approximate},
    {"tensormap", decode_tensormap_object},
    {"trap", decode_trap},
    {"vote", decode_vote},
    {"wgmma", decode_wgmma},
    {"xor", decode_logic},
};

}  // namespace

const Family* find_family(std::string_view root) {
    const auto* const end = std::end(kFamilies);
    const auto* const found = std::find_if(std::begin(kFamilies), end, [&](const Family& f) { return f.root == root; });
    return found == end ? nullptr : found;
}

}  // namespace emulator
