// setmaxnreg and griddepcontrol. PTX ISA, "Miscellaneous Instructions" and "Parallel Synchronization and Communication
// Instructions".
//
// At first all registers of a CTA belong to its threads. Each thread has .maxnreg registers, or the number that ptxas
// derives from the block size and .minnctapersm. `dec` releases registers, and `inc` waits until enough of them are
// free; exited warps release none. If the kernel states none of these, registers are not counted, because ptxas then
// ignores the instruction.
#include <algorithm>

#include "../cluster.h"
#include "../decoder.h"
#include "../wgmma.h"
#include "families.h"

namespace emulator {
namespace {

// value: the new number of registers of a thread; option[0]: 1 for dec.
Next setmaxnreg(Warp& warp, const Operation& o, uint32_t mask) {
    warp.wgmma().check_warpgroup();
    if (!warp.waits_for_registers) warp.wgmma().log({&o, {0, 0}, false});
    warp.waits_for_registers = false;
    if (warp.num_registers == 0) return Next::kContinue;
    Cta& cta = warp.cta;
    const int64_t more = o.value - warp.num_registers;
    if (o.option[0] != 0 ? more > 0 : more < 0) {
        throw Fault("wgmma",
                    "threads of this warp have " + std::to_string(warp.num_registers) + " registers, which is " +
                        (o.option[0] != 0 ? "fewer" : "more") + " than the new number",
                    __builtin_ctz(mask));
    }
    if (more * kWarpSize > cta.free_registers) {
        warp.waits_for_registers = true;
        return warp.wait_and_retry(Path::State::kRegisters, mask);
    }
    cta.free_registers -= more * kWarpSize;
    warp.num_registers = static_cast<int>(o.value);
    for (const auto& other : cta.warps()) other->retry(Path::State::kRegisters);
    return Next::kContinue;
}

// Only tells the race detector, because launches run one after the other. option[0]: 1 for wait.
Next griddepcontrol(Warp& warp, const Operation& o, uint32_t mask) {
    HappensBefore* const order = warp.cta.cluster.order.get();
    if (order == nullptr) return Next::kContinue;
    if (o.option[0] != 0) {
        order->wait_for_predecessor(warp.acting(mask));
    } else {
        order->launch_dependents(warp.acting(mask));
    }
    return Next::kContinue;
}

}  // namespace

int registers_at_launch(const Launch& launch) {
    const ptx::Function& kernel = *launch.program->functions[0]->source;
    constexpr int kPerMultiprocessor = 65536, kUnit = 8, kMost = 255;
    if (kernel.most_registers != 0) return kernel.most_registers;
    const int* const threads = kernel.required_threads[0] != 0 ? kernel.required_threads : kernel.most_threads;
    const int64_t count = int64_t{threads[0]} * threads[1] * threads[2] * kernel.least_ctas;
    if (count == 0) return 0;
    const int64_t share = kPerMultiprocessor / count / kUnit * kUnit;
    return static_cast<int>(std::min<int64_t>(share, kMost));
}

void decode_setmaxnreg(Decoder& d) {
    Operation& o = d.operation();
    d.require_target(90);
    o.option[0] = d.require_any({"inc", "dec"});
    d.require_any({"sync"});
    d.require_any({"aligned"});
    d.require_type({Type::kU32});
    d.require_operands(1, 1);
    o.value = d.immediate(0);
    if (o.value < 24 || o.value > 256 || o.value % 8 != 0)
        d.fail("a number of registers is a multiple of 8 in 24 to 256");
    o.is_aligned = true;
    o.type = Class::kControl;
    o.execute = setmaxnreg;
}

void decode_griddepcontrol(Decoder& d) {
    d.require_target(90);
    d.operation().option[0] = d.require_any({"launch_dependents", "wait"});
    d.require_operands(0, 0);
    d.operation().type = Class::kControl;
    d.operation().execute = griddepcontrol;
}

}  // namespace emulator
