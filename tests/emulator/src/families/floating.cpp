#include "floating.h"

namespace emulator {

uint32_t encode(double value, Format format, Rounding rounding, bool saturate) {
    const int m = format.mantissa_bits, e = format.exponent_bits;
    const uint32_t sign = std::signbit(value) ? 1u << (m + e) : 0;
    const uint32_t largest = format.largest(), infinity = largest + 1;
    if (std::isnan(value)) return format.nan();
    const double magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return sign | (saturate ? largest : infinity);
    if (magnitude == 0) return sign;
    int exponent;
    std::frexp(magnitude, &exponent);  // magnitude is in [0.5, 1) · 2^exponent
    const int lowest = 1 - format.bias();
    const int unit = (exponent - 1 < lowest ? lowest : exponent - 1) - m;  // log2 of the last place
    const double scaled = std::ldexp(magnitude, -unit);                    // exact
    double whole = std::floor(scaled);
    const double fraction = scaled - whole;
    bool up = false;
    switch (rounding) {
        case Rounding::kNearestEven:
            up = fraction > 0.5 || (fraction == 0.5 && std::fmod(whole, 2) != 0);
            break;
        case Rounding::kNearestAway:
            up = fraction >= 0.5;
            break;
        case Rounding::kZero:
            break;
        case Rounding::kDown:
            up = fraction > 0 && sign != 0;
            break;
        case Rounding::kUp:
            up = fraction > 0 && sign == 0;
            break;
    }
    if (up) whole += 1;
    // whole <= 2^(m+1). If rounding up made it equal, the addition carries into the exponent.
    const int biased = unit + m + format.bias();
    const auto significand = static_cast<uint32_t>(whole);
    const uint32_t bits =
        significand < (1u << m) ? significand : (static_cast<uint32_t>(biased - 1) << m) + significand;
    if (bits <= largest) return sign | bits;
    const bool stays_finite = saturate || rounding == Rounding::kZero || (rounding == Rounding::kDown && sign == 0) ||
                              (rounding == Rounding::kUp && sign != 0);
    return sign | (stays_finite ? largest : infinity);
}

}  // namespace emulator
