// The decoders of all families. table.cpp calls those with a parameter `type` after it has decoded the type.
#pragma once

#include "../decoder.h"

namespace emulator {

void decode_integer(Decoder& d, Type type);
void decode_float(Decoder& d, Type type);  // f32, f64
// f16, bf16 and their pairs. `flushes`: the caller has accepted .ftz.
void decode_half(Decoder& d, Type type, bool flushes = false);
void decode_extended(Decoder& d, bool writes_carry);  // add, sub and mad with the carry flag

void decode_approximate(Decoder& d);  // ex2, lg2, sin, cos, tanh, rsqrt, rcp, sqrt
void decode_carry(Decoder& d);        // addc, subc, madc
void decode_sad(Decoder& d);
void decode_dot(Decoder& d);
void decode_bit_mask(Decoder& d);  // bmsk, szext
void decode_logic(Decoder& d);
void decode_shift(Decoder& d);
void decode_funnel_shift(Decoder& d);
void decode_lop3(Decoder& d);
void decode_prmt(Decoder& d);
void decode_bit_field(Decoder& d);
void decode_count_bits(Decoder& d);
void decode_setp(Decoder& d);
void decode_set(Decoder& d);
void decode_selp(Decoder& d);
void decode_cvt(Decoder& d);
void decode_cvt_fp8(Decoder& d, Type to, Type from);
void decode_cvt_pack(Decoder& d);
void decode_mov(Decoder& d);
void decode_cvta(Decoder& d);
void decode_isspacep(Decoder& d);
void decode_ld(Decoder& d);
void decode_st(Decoder& d);
void decode_prefetch(Decoder& d);
void decode_createpolicy(Decoder& d);
void decode_atom(Decoder& d);
void decode_shfl(Decoder& d);
void decode_vote(Decoder& d);
void decode_match(Decoder& d);
void decode_redux(Decoder& d);
void decode_elect(Decoder& d);
void decode_activemask(Decoder& d);
void decode_barrier(Decoder& d);
void decode_cluster_barrier(Decoder& d);
void decode_mbarrier(Decoder& d);
void decode_fence(Decoder& d);
void decode_cp(Decoder& d);
void decode_cp_async_mbarrier(Decoder& d);  // cp.async.mbarrier.arrive
void decode_mapa(Decoder& d);
void decode_getctarank(Decoder& d);
void decode_st_async(Decoder& d);
void decode_red_async(Decoder& d);
void decode_tensormap_object(Decoder& d);
void decode_ldmatrix(Decoder& d);
void decode_stmatrix(Decoder& d);
void decode_wgmma(Decoder& d);
void decode_setmaxnreg(Decoder& d);
void decode_griddepcontrol(Decoder& d);
void decode_mma(Decoder& d);
bool decode_other_mma(Decoder& d);  // the shapes of mma_shapes.cpp; false: the instruction is none of them
void decode_nanosleep(Decoder& d);

}  // namespace emulator
