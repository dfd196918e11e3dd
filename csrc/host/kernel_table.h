// The kernels of this library, as the host finds and starts them. Every instance (a .cu file, compiled for one
// combination of values in instances.json) adds a row to its kernel's table when the library is loaded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "host/launch.h"
#include "host/params.h"

namespace fastattn {

// The tile of a CTA's step, and how many CTAs an SM is to hold; 0 for what a kernel does not have.
struct TileFacts {
    int32_t block_m, block_n, block_k, num_warps, ctas_per_sm;
};

template <typename Tile>
constexpr TileFacts tile_facts() {
    return {Tile::kBlockM, Tile::kBlockN, 0, Tile::kNumWarps, Tile::kMinCtasPerSm};
}

// The head dims that a kernel has room for, or that a call has: of queries and keys, and of values. Of a matmul both
// are the rows of a tile. 0: any.
struct KernelSize {
    int32_t head_dim, value_dim;

    constexpr KernelSize(int32_t both) : head_dim(both), value_dim(both) {}
    constexpr KernelSize(int32_t head_dim, int32_t value_dim) : head_dim(head_dim), value_dim(value_dim) {}

    constexpr bool holds(const KernelSize& call) const {
        return head_dim >= call.head_dim && value_dim >= call.value_dim;
    }

    constexpr int32_t cost() const { return head_dim + value_dim; }  // as the products of attention grow with them
};

// For what one instance is compiled.
struct KernelKey {
    int32_t architecture;  // that it is written for
    KernelSize size;
    std::optional<DataType> dtype;  // none: any
    std::optional<bool> variant;    // each table says what is meant; none: both
    int32_t shared_bytes = 0;       // that a CTA must be able to have; 0: what any GPU of the architecture has
};

// A kernel of sm_80 runs on all later GPUs; sm_90a has instructions that no other GPU has.
inline bool runs_on(int32_t architecture, int32_t compute_capability) {
    return architecture == 90 ? compute_capability == 90 : compute_capability >= architecture;
}

// "64", or "192, 128" where the head dim of values differs.
inline std::string to_string(const KernelSize& size) {
    return std::to_string(size.head_dim) +
           (size.value_dim != size.head_dim ? ", " + std::to_string(size.value_dim) : "");
}

// "kernel<64, bfloat16>"; empty arguments are left out.
inline std::string kernel_name(const std::string& kernel, std::initializer_list<std::string> arguments) {
    std::string list;
    for (const std::string& argument : arguments) {
        if (!argument.empty()) list += (list.empty() ? "" : ", ") + argument;
    }
    return list.empty() ? kernel : kernel + '<' + list + '>';
}

// Names and tiles of all kernels, in the order in which they were added.
struct ListedKernel {
    std::string name;
    TileFacts tile;
};

inline std::vector<ListedKernel>& listed_kernels() {
    static auto& list = *new std::vector<ListedKernel>;
    return list;
}

template <typename Params, typename Tile = TileFacts>
class KernelTable {
  public:
    using Launcher = void (*)(LaunchedKernel&, const Params&, Stream);

    struct Row {
        Row(const KernelKey& key, std::string name, const Tile& tile, Launcher launcher)
            : key(key), tile(tile), kernel(std::move(name), key.architecture), launcher(launcher) {}

        const std::string& name() const { return kernel.name(); }
        void launch(const Params& params, Stream stream) { launcher(kernel, params, stream); }

        const KernelKey key;
        const Tile tile;
        LaunchedKernel kernel;
        const Launcher launcher;
    };

    // `operation`: what errors call what these kernels do.
    explicit KernelTable(const char* operation) : operation_(operation) {}

    void add(const KernelKey& key, std::string name, const Tile& tile, Launcher launcher) {
        listed_kernels().push_back({name, tile});
        const auto place =
            std::find_if(rows_.begin(), rows_.end(), [&](const Row& row) { return order_of(key) < order_of(row.key); });
        rows_.emplace(place, key, std::move(name), tile, launcher);
    }

    // The row for a GPU on which a CTA can have so much shared memory: of the newest architecture that has one for it,
    // the cheapest that holds a call of this size, and of these the one that uses the most of it. Null where there is
    // none.
    Row* find_or_null(int32_t compute_capability, KernelSize size, std::optional<DataType> dtype, bool variant,
                      int32_t shared_bytes = kAnySharedBytes) {
        for (Row& row : rows_) {
            if (row.key.size.holds(size) && row.key.dtype == dtype && row.key.variant.value_or(variant) == variant &&
                row.key.shared_bytes <= shared_bytes && runs_on(row.key.architecture, compute_capability)) {
                return &row;
            }
        }
        return nullptr;
    }

    // Does the same, and throws std::runtime_error if there is none.
    Row& find(int32_t compute_capability, KernelSize size, std::optional<DataType> dtype, bool variant,
              int32_t shared_bytes = kAnySharedBytes) {
        if (Row* row = find_or_null(compute_capability, size, dtype, variant, shared_bytes)) return *row;
        throw std::runtime_error("fastattn: no kernel of " + std::string(operation_) + " for size " + to_string(size) +
                                 (dtype ? std::string(" and ") + to_string(*dtype) : "") +
                                 " runs on a GPU of compute capability " + std::to_string(compute_capability / 10) +
                                 '.' + std::to_string(compute_capability % 10));
    }

    // Calls function(row) with the rows among which a planner chooses for a GPU, by architecture, the newest first, and
    // by size.
    template <typename Function>
    void for_each_row(int32_t compute_capability, DataType dtype, bool variant, Function&& function) {
        for (Row& row : rows_) {
            if (row.key.dtype == dtype && row.key.variant.value_or(variant) == variant &&
                runs_on(row.key.architecture, compute_capability)) {
                function(row);
            }
        }
    }

    int32_t largest_head_dim() const {
        int32_t largest = 0;
        for (const Row& row : rows_) largest = std::max(largest, row.key.size.head_dim);
        return largest;
    }

  private:
    static constexpr int32_t kAnySharedBytes = std::numeric_limits<int32_t>::max();  // the table has no key with more

    static std::tuple<int32_t, int32_t, int32_t> order_of(const KernelKey& key) {
        return {-key.architecture, key.size.cost(), -key.shared_bytes};
    }

    const char* operation_;
    std::list<Row> rows_;  // in this order; addresses stay
};

// Adds a row while the library is being loaded.
struct Registration {
    template <typename Table, typename... Row>
    Registration(Table& table, const Row&... row) {
        table.add(row...);
    }
};

// Likewise of a source that is compiled once for both dtypes: of each translation unit, headers alone take seconds.
// Calls add(std::integral_constant<DataType, …>) for each dtype.
struct Registrations {
    template <typename Add>
    explicit Registrations(Add&& add) {
        add(std::integral_constant<DataType, DataType::kFloat16>{});
        add(std::integral_constant<DataType, DataType::kBFloat16>{});
    }
};

}  // namespace fastattn
