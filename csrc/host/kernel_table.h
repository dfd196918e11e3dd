// Tables in which the host finds and launches the kernels of this library. Every instance (a .cu file, compiled for one
// combination of values in instances.json) adds rows to its kernel's table when the library is loaded.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>

#include "host/launch.h"
#include "host/params.h"

namespace fastattn {

// The tile of a CTA's step, and how many CTAs an SM should hold. A number that means nothing for a kernel is 0.
struct TileFacts {
    int32_t block_m, block_n, block_k, num_warps, ctas_per_sm;
};

template <typename Tile>
constexpr TileFacts tile_facts() {
    return {Tile::kBlockM, Tile::kBlockN, 0, Tile::kNumWarps, Tile::kMinCtasPerSm};
}

// The head dim of queries and keys, and the head dim of values: the largest that a kernel takes, or those of a call.
// For a matmul, both numbers are the rows of a tile. 0: the kernel has no size.
struct KernelSize {
    int32_t head_dim, value_dim;

    constexpr KernelSize(int32_t both) : head_dim(both), value_dim(both) {}
    constexpr KernelSize(int32_t head_dim, int32_t value_dim) : head_dim(head_dim), value_dim(value_dim) {}

    constexpr bool holds(const KernelSize& call) const {
        return head_dim >= call.head_dim && value_dim >= call.value_dim;
    }

    constexpr int32_t cost() const { return head_dim + value_dim; }  // proportional to the products of attention
};

// The properties for which a kernel is compiled.
struct KernelKey {
    int32_t architecture;  // 80 or 90: see runs_on()
    KernelSize size;
    std::optional<DataType> dtype;  // none: any
    std::optional<bool> flag;       // each table says what it means; none: both
    int32_t shared_bytes = 0;       // that a CTA must be able to have; 0: any GPU of the architecture has enough

    // Orders a table's rows: newest architecture first, then lowest cost(), then most shared memory of a CTA.
    constexpr bool comes_before(const KernelKey& other) const {
        if (architecture != other.architecture) return architecture > other.architecture;
        if (size.cost() != other.size.cost()) return size.cost() < other.size.cost();
        return shared_bytes > other.shared_bytes;
    }
};

// A kernel for sm_80 runs on all later GPUs. A kernel for sm_90 runs only on sm_90, because it is compiled for sm_90a,
// which has instructions that no other GPU has.
inline bool runs_on(int32_t architecture, int32_t compute_capability) {
    return architecture == 90 ? compute_capability == 90 : compute_capability >= architecture;
}

// One argument in a kernel's name: a word, a number with its unit, or two head dims ("192, 128") if that of the values
// differs. An empty word is left out.
struct NameArgument {
    const char* word = "";
    KernelSize size = 0;  // 0: there is only the word

    NameArgument(const char* word) : word(word) {}
    NameArgument(DataType dtype) : word(to_string(dtype)) {}
    NameArgument(const KernelSize& size) : size(size) {}
    NameArgument(int32_t number, const char* unit = "") : word(unit), size(number) {}
};

// Returns a name such as "kernel<64, bfloat16>", which lives as long as the process.
const char* kernel_name(const char* kernel, std::initializer_list<NameArgument> arguments);

// Adds a kernel to those that listed_kernels() returns (listed_kernels.h).
void list_kernel(const char* name, const TileFacts& tile);

[[noreturn]] void throw_no_kernel(const char* operation, const KernelSize& size, std::optional<DataType> dtype,
                                  int32_t compute_capability);

template <typename Params, typename Tile = TileFacts>
class KernelTable {
  public:
    using Launcher = void (*)(LaunchedKernel&, const Params&, Stream);

    struct Row {
        const KernelKey key;
        const Tile tile;
        LaunchedKernel kernel;
        const Launcher launcher;
        Row* next;

        const char* name() const { return kernel.name(); }
        void launch(const Params& params, Stream stream) { launcher(kernel, params, stream); }
    };

    // operation: the name of what these kernels compute, for error messages.
    explicit KernelTable(const char* operation) : operation_(operation) {}

    void add(const KernelKey& key, const char* name, const Tile& tile, Launcher launcher) {
        list_kernel(name, tile);
        Row** place = &first_;
        while (*place != nullptr && !key.comes_before((*place)->key)) place = &(*place)->next;
        *place = new Row{key, tile, LaunchedKernel(name, key.architecture), launcher, *place};
    }

    // Returns the first row whose kernel takes a call of this size and runs on a GPU that gives a CTA shared_bytes of
    // shared memory. Returns null if there is none.
    Row* find_or_null(int32_t compute_capability, KernelSize size, std::optional<DataType> dtype, bool flag,
                      int32_t shared_bytes = kAnySharedBytes) {
        for (Row* row = first_; row != nullptr; row = row->next) {
            const KernelKey& key = row->key;
            if (key.size.holds(size) && key.dtype == dtype && key.flag.value_or(flag) == flag &&
                key.shared_bytes <= shared_bytes && runs_on(key.architecture, compute_capability)) {
                return row;
            }
        }
        return nullptr;
    }

    // Does what find_or_null() does, but throws std::runtime_error if there is no such row.
    Row& find(int32_t compute_capability, KernelSize size, std::optional<DataType> dtype, bool flag,
              int32_t shared_bytes = kAnySharedBytes) {
        if (Row* row = find_or_null(compute_capability, size, dtype, flag, shared_bytes)) return *row;
        throw_no_kernel(operation_, size, dtype, compute_capability);
    }

    // Calls function(row), in the order of the table, for the rows of this dtype and flag that run on a GPU.
    template <typename Function>
    void for_each_row(int32_t compute_capability, DataType dtype, bool flag, Function&& function) {
        for (Row* row = first_; row != nullptr; row = row->next) {
            const KernelKey& key = row->key;
            if (key.dtype == dtype && key.flag.value_or(flag) == flag &&
                runs_on(key.architecture, compute_capability)) {
                function(*row);
            }
        }
    }

    int32_t largest_head_dim() const {
        int32_t largest = 0;
        for (const Row* row = first_; row != nullptr; row = row->next) {
            if (row->key.size.head_dim > largest) largest = row->key.size.head_dim;
        }
        return largest;
    }

  private:
    static constexpr int32_t kAnySharedBytes = 0x7fffffff;  // at least what any key has

    const char* operation_;
    Row* first_ = nullptr;  // rows are never removed
};

// Adds a row while the library is being loaded.
struct Registration {
    template <typename Table, typename... Row>
    Registration(Table& table, const Row&... row) {
        table.add(row...);
    }
};

// Lists the values of one macro for which one translation unit compiles a source.
template <auto... kValues>
struct Values {};

// Adds the rows of a source that one translation unit compiles for both dtypes and, if given, for several values of one
// macro. One translation unit compiles all of them because the headers take seconds to compile. Calls add(dtype) or
// add(dtype, value) for each, with std::integral_constants.
struct Registrations {
    template <typename Add>
    explicit Registrations(Add&& add) {
        add(std::integral_constant<DataType, DataType::kFloat16>{});
        add(std::integral_constant<DataType, DataType::kBFloat16>{});
    }

    template <auto... kValues, typename Add>
    Registrations(Values<kValues...>, Add&& add)
        : Registrations([&](auto dtype) { (add(dtype, std::integral_constant<decltype(kValues), kValues>{}), ...); }) {}
};

}  // namespace fastattn
