// Operations that compute each lane of the result from the same lane of the operands.
#pragma once

#include "../machine.h"

namespace emulator {

template <typename T, typename F>
Next unary(Warp& warp, const Operation& operation, uint32_t mask) {
    T* d = warp.reg<T>(operation.r[0]);
    const T* a = warp.reg<T>(operation.r[1]);
    each_lane(mask, [&](int lane) { d[lane] = F::apply(a[lane]); });
    return Next::kContinue;
}

template <typename T, typename F>
Next binary(Warp& warp, const Operation& operation, uint32_t mask) {
    T* d = warp.reg<T>(operation.r[0]);
    const T *a = warp.reg<T>(operation.r[1]), *b = warp.reg<T>(operation.r[2]);
    each_lane(mask, [&](int lane) { d[lane] = F::apply(a[lane], b[lane]); });
    return Next::kContinue;
}

template <typename T, typename F>
Next ternary(Warp& warp, const Operation& operation, uint32_t mask) {
    T* d = warp.reg<T>(operation.r[0]);
    const T *a = warp.reg<T>(operation.r[1]), *b = warp.reg<T>(operation.r[2]), *c = warp.reg<T>(operation.r[3]);
    each_lane(mask, [&](int lane) { d[lane] = F::apply(a[lane], b[lane], c[lane]); });
    return Next::kContinue;
}

}  // namespace emulator
