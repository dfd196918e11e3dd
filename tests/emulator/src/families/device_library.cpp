// printf and assert in device code. malloc and free are errors.
#include "device_library.h"

#include <cstdio>

#include "../console.h"
#include "../machine.h"

namespace emulator {
namespace {

constexpr const char* kNames[] = {"vprintf", "__assertfail", "malloc", "free"};

template <typename T>
T load(Warp& warp, Space space, uint64_t address, int lane) {
    T value;
    std::memcpy(&value, warp.access(space, address, sizeof(T), lane, false), sizeof(T));
    return value;
}

// Returns an argument of the call. The slot holds the argument's address in local memory.
template <typename T>
T argument(Warp& warp, Slot slot, int lane) {
    return load<T>(warp, Space::kLocal, warp.reg<uint64_t>(slot)[lane], lane);
}

std::string load_string(Warp& warp, uint64_t address, int lane) {
    std::string text;
    while (const char c = load<char>(warp, Space::kGeneric, address++, lane)) text += c;
    return text;
}

// The arguments of printf, which vprintf gets in a buffer. Each is aligned to its size.
class Arguments {
  public:
    Arguments(Warp& warp, uint64_t address, int lane) : warp_(warp), address_(address), lane_(lane) {}
    template <typename T>
    T next() {
        address_ = (address_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
        const T value = load<T>(warp_, Space::kGeneric, address_, lane_);
        address_ += sizeof(T);
        ++count_;
        return value;
    }
    std::string next_string() { return load_string(warp_, next<uint64_t>(), lane_); }
    int count() const { return count_; }

  private:
    Warp& warp_;
    uint64_t address_;
    int lane_, count_ = 0;
};

template <typename T>
std::string print_one(const std::string& specifier, T value) {
    const int length = std::snprintf(nullptr, 0, specifier.c_str(), value);
    std::string text(length, '\0');
    std::snprintf(text.data(), length + 1, specifier.c_str(), value);
    return text;
}

// Formats one conversion, from its % on, with the host's snprintf. The length modifier determines the argument's type.
std::string convert(const std::string& format, size_t& at, Arguments& arguments, int lane) {
    std::string specifier = "%", length;
    for (++at; at < format.size() && std::strchr("-+ #0123456789.*", format[at]) != nullptr; ++at) {
        specifier += format[at] == '*' ? std::to_string(arguments.next<int32_t>()) : std::string(1, format[at]);
    }
    while (at < format.size() && std::strchr("hlLzjt", format[at]) != nullptr) length += format[at++];
    const char conversion = at < format.size() ? format[at++] : '\0';
    const bool is_wide = length == "l" || length == "ll" || length == "z" || length == "j" || length == "t";
    switch (conversion) {
        case '%':
            return "%";
        case 'd':
        case 'i': {
            const int64_t value = is_wide          ? arguments.next<int64_t>()
                                  : length == "hh" ? static_cast<int8_t>(arguments.next<int32_t>())
                                  : length == "h"  ? static_cast<int16_t>(arguments.next<int32_t>())
                                                   : arguments.next<int32_t>();
            return print_one(specifier + "lld", static_cast<long long>(value));
        }
        case 'u':
        case 'o':
        case 'x':
        case 'X': {
            const uint64_t value = is_wide          ? arguments.next<uint64_t>()
                                   : length == "hh" ? static_cast<uint8_t>(arguments.next<uint32_t>())
                                   : length == "h"  ? static_cast<uint16_t>(arguments.next<uint32_t>())
                                                    : arguments.next<uint32_t>();
            return print_one(specifier + "ll" + conversion, static_cast<unsigned long long>(value));
        }
        case 'c':
            return print_one(specifier + 'c', arguments.next<int32_t>());
        case 's':
            return print_one(specifier + 's', arguments.next_string().c_str());
        case 'p':
            return print_one(specifier + 'p', reinterpret_cast<void*>(arguments.next<uint64_t>()));
        case 'e':
        case 'E':
        case 'f':
        case 'F':
        case 'g':
        case 'G':
        case 'a':
        case 'A':
            return print_one(specifier + conversion, arguments.next<double>());
        default:
            throw Fault("unsupported", "printf: an unknown conversion in \"" + format + "\"", lane);
    }
}

// r: addresses in local memory of the result, the format and the values.
Next print(Warp& warp, const Operation& o, uint32_t mask) {
    std::string text;
    each_lane(mask, [&](int lane) {
        const std::string format = load_string(warp, argument<uint64_t>(warp, o.r[1], lane), lane);
        Arguments arguments(warp, argument<uint64_t>(warp, o.r[2], lane), lane);
        for (size_t at = 0; at < format.size();) {
            text += format[at] == '%' ? convert(format, at, arguments, lane) : std::string(1, format[at++]);
        }
        const int32_t count = arguments.count();
        std::memcpy(warp.access(Space::kLocal, warp.reg<uint64_t>(o.r[0])[lane], sizeof(count), lane, true), &count,
                    sizeof(count));
    });
    print_on_console(warp.cta.launch, text);
    return Next::kContinue;
}

// r: addresses in local memory of the expression, the file, the line and the function.
Next fail_assertion(Warp& warp, const Operation& o, uint32_t mask) {
    const int lane = __builtin_ctz(mask);
    const auto text = [&](int i) { return load_string(warp, argument<uint64_t>(warp, o.r[i], lane), lane); };
    throw Fault("assert",
                text(1) + ":" + std::to_string(argument<uint32_t>(warp, o.r[2], lane)) + ": " + text(3) +
                    ": assertion `" + text(0) + "` failed",
                lane);
}

Next fail_allocation(Warp&, const Operation& o, uint32_t mask) {
    throw Fault("unsupported", std::string(kNames[o.value]) + " in device code: there is no heap", __builtin_ctz(mask));
}

}  // namespace

bool is_in_device_library(const std::string& name) {
    return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

void decode_device_library(Decoder& d, const std::string& name, const ptx::Operand* results,
                           const ptx::Operand* arguments) {
    Operation& o = d.operation();
    o.value = std::find(std::begin(kNames), std::end(kNames), name) - std::begin(kNames);
    const bool prints = name == "vprintf";
    constexpr size_t kNumResults[] = {1, 0, 1, 0}, kNumArguments[] = {2, 5, 1, 1};
    const auto count = [](const ptx::Operand* list) { return list == nullptr ? 0 : list->elements.size(); };
    if (count(results) != kNumResults[o.value] || count(arguments) != kNumArguments[o.value]) {
        d.fail("the call passes another number of parameters than the function has");
    }
    size_t next = 0;
    if (prints) o.r[next++] = d.read(results->elements[0], Type::kB64);
    for (const ptx::Operand& element : arguments->elements) o.r[next++] = d.read(element, Type::kB64);
    o.execute = prints ? print : name == "__assertfail" ? fail_assertion : fail_allocation;
}

}  // namespace emulator
