// A decoded kernel: its instructions, and those of the functions that it calls, as compact operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ptx.h"
#include "types.h"

namespace emulator {

class Warp;
struct Operation;

enum class Next : uint8_t {
    kContinue,  // the path goes on with the next instruction
    kJumped,    // the path's pc has been set
    kBlocked,   // the path waits, or has ended
};

// Runs an operation for the lanes in the mask, which is not 0.
using Execute = Next (*)(Warp& warp, const Operation& operation, uint32_t mask);

// The offset of a register in its function's frame, in bytes. Registers that are not alive at the same time may share a
// slot (register_allocation.cpp). A register holds 32 values, one per lane; a predicate is one word with a bit per
// lane. Constants and special registers have slots too, which no instruction writes.
using Slot = uint32_t;

constexpr int kMostRegisters = 20;

// The memory order and the scope of an access. Volatile accesses count as relaxed. .sys counts as .gpu, because nothing
// outside of the emulated GPU runs at the same time.
enum class Order : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Scope : uint8_t { kCta, kCluster, kGpu };

enum class Class : uint8_t {
    kInteger,
    kFloat,
    kHalf,
    kCompare,
    kLogic,
    kConvert,
    kMove,
    kGlobal,
    kShared,
    kLocal,
    kParam,
    kAtomic,
    kAsync,
    kWarp,
    kBarrier,
    kMatrixLoad,
    kTensorCore,
    kControl,
    kCount,
};

constexpr const char* kClassNames[] = {"integer", "float",  "half",    "compare",     "logic",       "convert",
                                       "move",    "global", "shared",  "local",       "param",       "atomic",
                                       "async",   "warp",   "barrier", "matrix load", "tensor core", "control"};

struct Operation {
    Execute execute = nullptr;
    Slot r[kMostRegisters] = {};  // written registers come first
    std::vector<Slot> registers;  // instead of `r`, where the number of registers varies
    int64_t value = 0;            // each family gives `value` and `option` a meaning of its own
    int32_t option[4] = {};
    int32_t target = -1;   // the operation that a branch jumps to
    int32_t join = -1;     // the operation where lanes that diverge at a branch reconverge
    int32_t tracked = -1;  // index into Program::tracked_accesses; -1: it accesses no tracked register
    Slot guard = 0;
    bool is_guarded = false, guard_negated = false;
    bool is_aligned = false;  // all lanes of the warp must execute it together
    bool has_member_mask = false;
    bool is_sum = false;   // an atomic that adds floating-point numbers
    Slot member_mask = 0;  // .sync: the register with the mask of lanes that wait for each other
    Class type = Class::kMove;
    Order order = Order::kWeak;
    Scope scope = Scope::kCta;
    const ptx::Instruction* instruction = nullptr;
};

enum class Special : uint8_t {
    kTid,
    kNtid,
    kCtaid,
    kNctaid,
    kLaneid,
    kWarpid,
    kNwarpid,
    kLanemask,
    kDynamicShared,
    kTotalShared,
    kLocalBase,
    kSharedBase,
    kSmid,
    kNsmid,
    kGridid,
    kClusterid,
    kNclusterid,
    kClusterCtaid,
    kClusterNctaid,
    kClusterCtarank,
    kClusterNctarank,
    kEnvironment,
};

struct SpecialSlot {
    Slot slot;
    Special special;
    int index;  // x, y or z; the number of the lane mask; an offset for kLocalBase and kSharedBase
    int width;
};

// A register that wgmma uses, or that a chain of movs connects with such a register. `id` numbers them in a function.
struct TrackedRegister {
    Slot slot;
    int32_t id;
};

// The tracked registers that an operation reads and writes, in the order of its operands.
struct TrackedAccess {
    std::vector<TrackedRegister> reads, writes;
    bool is_move = false;   // a mov of one register into another
    bool is_wgmma = false;  // wgmma.mma_async itself
};

struct FunctionCode {
    const ptx::Function* source = nullptr;
    int first = 0, end = 0;        // its operations are [first, end]; all paths reconverge at `end`, which returns
    std::vector<std::byte> image;  // initial contents of a frame
    std::vector<SpecialSlot> specials;
    int32_t num_tracked = 0;                 // tracked registers
    int64_t local_bytes = 0;                 // local memory of one lane: variables and call parameters
    std::map<std::string, int64_t> formals;  // offsets in local memory of a .func's parameters and results
};

struct Copy {
    int64_t from, to, bytes;
};

struct Call {
    const FunctionCode* callee;
    std::vector<Copy> arguments;  // from the caller's local memory to the callee's
    std::vector<Copy> results;    // and back
};

struct Parameter {
    std::string name;
    Type type;
    int64_t offset, bytes;
    bool is_array;
};

struct Program {
    std::string name;
    const ptx::Module* module = nullptr;
    std::vector<Operation> operations;
    std::vector<std::unique_ptr<FunctionCode>> functions;  // [0]: the kernel
    std::vector<std::unique_ptr<Call>> calls;
    std::vector<std::map<uint64_t, const Call*>> indirect_calls;  // for each instruction, by the function's address
    std::vector<std::vector<int32_t>> jump_tables;
    std::vector<TrackedAccess> tracked_accesses;
    std::vector<Parameter> parameters;
    int64_t parameter_bytes = 0;
    std::map<std::string, int64_t> shared_offsets;
    int64_t static_shared_bytes = 0;
    int64_t dynamic_shared_begin = 0;  // an address
};

}  // namespace emulator
