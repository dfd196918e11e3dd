#include "happens_before.h"

namespace emulator {

void Knowledge::join(const Knowledge& from) {
    past.join(from.past);
    for (int i = 0; i < kNumScopes; ++i) {
        fenced[i].join(from.fenced[i]);
        observed[i].join(from.observed[i]);
    }
}

uint32_t LaunchHistory::add_cluster(std::vector<std::array<uint32_t, 3>> ctas, uint32_t warps_per_cta) {
    const std::lock_guard lock(mutex_);
    clusters_.push_back({std::move(ctas), warps_per_cta});
    return static_cast<uint32_t>(clusters_.size() - 1);
}

LaunchHistory::Origin LaunchHistory::origin(const Record& record) const {
    const std::lock_guard lock(mutex_);
    const ClusterPlace& cluster = clusters_[record.cluster];
    const uint32_t rank = record.warp / cluster.warps_per_cta;
    return {cluster.ctas[rank], rank, record.warp % cluster.warps_per_cta};
}

void LaunchHistory::follow(PastAccesses&& before) {
    predecessor_ = std::move(before.kernel);
    for (auto& [number, page] : before.pages) {
        for (Cell& cell : page->cells) {
            uint32_t kept = 0;
            for (uint32_t i = 0; i < cell.count; ++i) {
                Record record = cell.records()[i];
                if (record.cluster == kPredecessor.cluster && before.are_last) continue;
                record.cluster = kPredecessor.cluster;
                record.warp = kPredecessor.component;
                record.clock = 1;
                record.place &= Record::kWrite | Record::kStrong | Record::kScope;
                record.place |= (kMostRecordedOperations - 1) << Record::kOperationShift;  // none of this program's
                cell.records()[kept++] = record;
            }
            cell.count = kept;
        }
        shard(number).pages[number] = std::move(page);
    }
}

std::shared_ptr<PastAccesses> LaunchHistory::take_accesses(const std::string& kernel) {
    constexpr size_t kMostPages = 8192;  // 128 MB of records
    size_t count = 0;
    for (const Shard& shard : shards_) count += shard.pages.size();
    if (count > kMostPages) return nullptr;
    auto taken = std::make_shared<PastAccesses>(PastAccesses{kernel, {}, has_waited_ && !lets_begin_early_});
    taken->pages.reserve(count);
    for (Shard& shard : shards_) {
        for (auto& [number, page] : shard.pages) taken->pages.emplace_back(number, std::move(page));
    }
    return taken;
}

HappensBefore::HappensBefore(LaunchHistory& history, std::vector<std::array<uint32_t, 3>> ctas, uint32_t warps_per_cta,
                             int64_t shared_bytes)
    : history_(history),
      warps_per_cta_(warps_per_cta),
      num_components_(static_cast<uint32_t>(ctas.size()) * warps_per_cta) {
    const size_t num_ctas = ctas.size();
    warps_.resize(num_components_);
    for (uint32_t warp = 0; warp < num_components_; ++warp) warps_[warp].past.known.set_own(warp, 1);
    for (size_t i = 0; i < num_ctas; ++i) shared_.emplace_back((shared_bytes + Cell::kBytes - 1) / Cell::kBytes);
    barriers_.resize(num_ctas * kNumBarriers);
    exited_.resize(num_ctas);
    over_.resize(num_ctas);
    cluster_ = history.add_cluster(std::move(ctas), warps_per_cta);
}

HappensBefore::~HappensBefore() {
    history_.operations_.keep(std::move(completions_));
}

// After a release: what the warp does from now on is not part of it.
void HappensBefore::advance(uint32_t warp) {
    VectorClock& known = warps_[warp].past.known;
    known.set_own(warp, known.own(warp) + 1);
}

// --- Accesses.

bool HappensBefore::includes(const VectorClock& clock, const Record& record) const {
    if (!record.has(Record::kAsync)) return includes(clock, {record.cluster, record.warp}, record.clock);
    return includes(clock, AsyncId{record.clock}, 1u << record.lane());
}

// That these lanes' parts of an operation are complete.
bool HappensBefore::includes(const VectorClock& clock, AsyncId id, uint32_t lanes) const {
    const Completion* completion = history_.operations_.at(id).completions.load(std::memory_order_acquire);
    for (; completion != nullptr && lanes != 0; completion = completion->next) {
        if (includes(clock, completion->agent, completion->clock)) lanes &= ~completion->lanes;
    }
    return lanes == 0;
}

// It has happened before, and what it wrote is there to be read.
bool HappensBefore::has_happened(const Past& past, const Record& record) const {
    if (includes(past.known, record)) return true;
    if (past.over.is_empty()) return false;
    const bool is_there = record.has(Record::kAsync) && record.scope() > static_cast<int>(Scope::kCta);
    return (is_there || !record.has(Record::kWrite)) && includes(past.over, record);
}

// The scope of each includes the other.
bool HappensBefore::are_morally_strong(const Record& a, const Record& b) const {
    if (!a.has(Record::kStrong) || !b.has(Record::kStrong)) return false;
    const Scope needed = a.cluster != b.cluster                               ? Scope::kGpu
                         : a.warp / warps_per_cta_ != b.warp / warps_per_cta_ ? Scope::kCluster
                                                                              : Scope::kCta;
    return std::min(a.scope(), b.scope()) >= static_cast<int>(needed);
}

namespace {

// Warps store the same value by the same instruction.
bool is_replicated(const Record& earlier, const Record& later) {
    return later.has(Record::kSilent) && earlier.has(Record::kWrite) && !earlier.has(Record::kAsync) &&
           earlier.operation() == later.operation();
}

}  // namespace

// `by`: the warp that makes the access, or that starts the operation which will.
void HappensBefore::touch(Cell& cell, const Record& now, uint32_t by, bool is_shared, uint64_t address) {
    const Past& past = warps_[by].past;
    const bool is_write = now.has(Record::kWrite);
    Record* const records = cell.records();
    uint32_t kept = 0;
    for (uint32_t i = 0; i < cell.count; ++i) {
        Record& record = records[i];
        const uint32_t both = record.bytes & now.bytes;
        if (both != 0) {
            const auto conflict = [&](Conflict::Kind kind) {
                return history_.fault({kind, record, now, is_shared, address + __builtin_ctz(both)});
            };
            const bool is_race = is_write || record.has(Record::kWrite);
            const bool is_same_operation =
                record.has(Record::kAsync) && now.has(Record::kAsync) && record.clock == now.clock;
            if (is_same_operation || has_happened(past, record)) {
                const bool crosses = !record.has(Record::kAsyncProxy) && now.has(Record::kAsyncProxy);
                const bool keeps_reads = crosses && history_.strict_proxy_reads;
                if (((crosses && record.has(Record::kWrite)) || (keeps_reads && is_write)) &&
                    !includes(is_shared ? past.visible_shared : past.visible_global, record)) {
                    throw conflict(Conflict::Kind::kNeedsProxyFence);
                }
                // Who conflicts with that record conflicts with this one, or knows of both.
                if (is_write || (!record.has(Record::kWrite) && !keeps_reads)) {
                    record.bytes &= static_cast<uint16_t>(~now.bytes);
                }
            } else if (record.has(Record::kSum) && now.has(Record::kSum)) {
                throw conflict(Conflict::Kind::kOpenSum);
            } else if (is_race && !are_morally_strong(record, now) && !is_replicated(record, now)) {
                throw conflict(includes(past.over, record) ? Conflict::Kind::kTooNarrow : Conflict::Kind::kUnordered);
            }
        }
        if (record.bytes == 0) continue;
        if (kept != i) records[kept] = record;
        ++kept;
    }
    cell.count = kept;
    cell.add(now);
}

namespace {

// Calls function(first byte of the cell, which of its bytes) for each cell of a range.
template <typename Function>
inline void each_cell(uint64_t address, uint64_t bytes, Function&& function) {
    const uint64_t end = address + bytes;
    while (address < end) {
        const uint64_t cell = address & ~(Cell::kBytes - 1), first = address - cell;
        const uint64_t last = std::min(end - cell, Cell::kBytes);
        function(cell, static_cast<uint16_t>((1u << last) - (1u << first)));
        address = cell + Cell::kBytes;
    }
}

}  // namespace

void HappensBefore::touch_shared(Record now, uint32_t by, uint32_t rank, uint64_t offset, uint64_t bytes) {
    std::vector<Cell>& cells = shared_[rank];
    if (offset + bytes > cells.size() * Cell::kBytes) return;  // out of bounds, which others report
    each_cell(offset, bytes, [&](uint64_t start, uint16_t mask) {
        now.bytes = mask;
        touch(cells[start / Cell::kBytes], now, by, true, uint64_t{rank} << 32 | start);
    });
}

void HappensBefore::touch_global(Record now, uint32_t by, uint64_t address, uint64_t bytes) {
    each_cell(address, bytes, [&](uint64_t start, uint16_t mask) {
        const uint64_t page = start / Page::kBytes;
        LaunchHistory::Shard& shard = history_.shard(page);
        const std::lock_guard lock(shard.lock);
        if (page != last_page_) {
            auto& found = shard.pages[page];
            if (found == nullptr) found = std::make_unique<Page>();
            last_page_ = page, page_ = found.get();
        }
        now.bytes = mask;
        touch(page_->cells[start % Page::kBytes / Cell::kBytes], now, by, false, start);
    });
}

Record HappensBefore::record_of(uint32_t warp, const Touch& touch) const {
    const uint32_t flags = (touch.is_write ? Record::kWrite : 0) | (touch.is_strong ? Record::kStrong : 0) |
                           static_cast<uint32_t>(touch.scope) << Record::kScopeShift |
                           (touch.is_silent ? Record::kSilent : 0) | (touch.is_sum ? Record::kSum : 0);
    return {
        warps_[warp].past.known.own(warp),
        touch.operation << Record::kOperationShift | static_cast<uint32_t>(touch.lane) << Record::kLaneShift | flags,
        cluster_, static_cast<uint16_t>(warp), 0};
}

Record HappensBefore::record_of(AsyncId id, const Touch& touch) {
    Record record = record_of(operation(id).warp, touch);
    record.clock = static_cast<uint32_t>(id);
    record.place |= Record::kAsync | (operation(id).proxy == Proxy::kAsync ? Record::kAsyncProxy : 0);
    return record;
}

// --- Asynchronous operations.

AsyncId HappensBefore::start(uint32_t warp, Proxy proxy) {
    if (next_operation_ % AsyncOperations::kChunk == 0) next_operation_ = history_.operations_.take_chunk();
    const AsyncId id{next_operation_++};
    operation(id).warp = static_cast<uint16_t>(warp);
    operation(id).proxy = proxy;
    return id;
}

void HappensBefore::add_completion(AsyncId id, Agent agent, uint32_t clock, uint32_t lanes) {
    auto& completions = operation(id).completions;
    completions_.push_back({agent, clock, lanes, completions.load(std::memory_order_relaxed)});
    completions.store(&completions_.back(), std::memory_order_release);
}

void HappensBefore::complete(AsyncId id, uint32_t warp, uint32_t lanes) {
    add_completion(id, {cluster_, warp}, warps_[warp].past.known.own(warp), lanes);
}

bool HappensBefore::is_known_complete(AsyncId id, uint32_t warp, uint32_t lanes) const {
    return includes(warps_[warp].past.known, id, lanes);
}

void HappensBefore::complete_into_mbarrier(AsyncId id, uint32_t rank, uint64_t offset, uint32_t lanes) {
    const MbarrierAgent& agent = mbarrier(rank, offset);
    add_completion(id, {cluster_, agent.component}, agent.phase + 1, lanes);
}

// --- Barriers.

void HappensBefore::init_mbarrier(uint32_t rank, uint64_t offset) {
    MbarrierAgent& agent = mbarrier(rank, offset);
    agent = {};
    agent.component = num_components_++;
    agent.pending.by_cta.resize(shared_.size());
    agent.completed.by_cta.resize(shared_.size());
}

// A relaxed arrival after a fence releases what the fence has seen.
void HappensBefore::release_to(Knowledge& meeting, uint32_t warp, bool releases, Scope scope) {
    if (releases) {
        meeting.join(warps_[warp]);
        advance(warp);
    } else {
        meeting.past.join(warps_[warp].fenced[static_cast<int>(scope)]);
    }
}

void HappensBefore::arrive_at_mbarrier(uint32_t warp, uint32_t rank, uint64_t offset, bool releases, Scope scope) {
    Arrivals& pending = mbarrier(rank, offset).pending;
    release_to(pending.by_cta[rank_of(warp)], warp, releases, Scope::kCta);
    if (scope != Scope::kCta && pending.by_cta.size() > 1) release_to(pending.wide, warp, releases, scope);
}

// Whoever sees a phase complete sees that all before it were, so that knowledge accumulates.
void HappensBefore::complete_phase(uint32_t rank, uint64_t offset) {
    MbarrierAgent& agent = mbarrier(rank, offset);
    for (size_t i = 0; i < agent.pending.by_cta.size(); ++i) agent.completed.by_cta[i].join(agent.pending.by_cta[i]);
    if (shared_.size() > 1) agent.completed.wide.join(agent.pending.wide);
    ++agent.phase;
}

void HappensBefore::wait_for_mbarrier(uint32_t warp, uint32_t rank, uint64_t offset, bool acquires, Scope scope) {
    const MbarrierAgent& agent = mbarrier(rank, offset);
    Knowledge& knowledge = warps_[warp];
    const auto see = [&](const Knowledge& completed, Scope by) {
        if (acquires) return knowledge.join(completed);
        knowledge.observed[static_cast<int>(by)].join(completed.past);
    };
    see(agent.completed.by_cta[rank_of(warp)], Scope::kCta);
    if (scope != Scope::kCta) see(agent.completed.wide, scope);
    Past& past = acquires ? knowledge.past : knowledge.observed[static_cast<int>(Scope::kCta)];
    for (size_t i = 0; i < agent.completed.by_cta.size(); ++i) {
        if (i != rank_of(warp)) past.join_over(agent.completed.by_cta[i].past);
    }
    past.known.set_own(agent.component, agent.phase);  // the copies that it counted are complete
}

void HappensBefore::arrive_at_barrier(uint32_t warp, int id) {
    release_to(barriers_[rank_of(warp) * kNumBarriers + id], warp, true, Scope::kCta);
}

void HappensBefore::leave_barrier(uint32_t warp, int id, bool is_for_all) {
    const uint32_t rank = rank_of(warp);
    warps_[warp].join(barriers_[rank * kNumBarriers + id]);
    if (is_for_all) warps_[warp].join(exited_[rank]);
}

void HappensBefore::exit(uint32_t warp) {
    exited_[rank_of(warp)].join(warps_[warp]);
    cluster_exited_.join(warps_[warp]);
}

void HappensBefore::arrive_at_cluster(uint32_t warp, bool releases) {
    cluster_arrived_.join(warps_[warp].past.known);
    release_to(cluster_pending_, warp, releases, Scope::kCluster);
    if (!releases) advance(warp);
}

void HappensBefore::complete_cluster() {
    cluster_completed_ = std::move(cluster_pending_);
    cluster_pending_ = {};
    cluster_completed_.join(cluster_exited_);
    cluster_left_ = cluster_arrived_;
}

void HappensBefore::leave_cluster(uint32_t warp) {
    warps_[warp].join(cluster_completed_);
    over_[rank_of(warp)].join(cluster_left_);
}

void HappensBefore::end(uint32_t rank) {
    const Past& past = exited_[rank].past;
    for (size_t i = 0; i < shared_[rank].size(); ++i) {
        Cell& cell = shared_[rank][i];
        for (uint32_t j = 0; j < cell.count; ++j) {
            const Record& record = cell.records()[j];
            const bool is_own = rank_of(record.warp) == rank && !record.has(Record::kAsyncProxy);
            if (is_own || has_happened(past, record) || includes(over_[rank], record)) continue;
            const uint64_t address = uint64_t{rank} << 32 | (i * Cell::kBytes + __builtin_ctz(record.bytes));
            throw history_.fault({Conflict::Kind::kBeyondEnd, record, record, true, address});
        }
    }
}

// --- Fences, releases and acquires.

void HappensBefore::fence(uint32_t warp, Scope scope, bool acquires, bool releases) {
    Knowledge& knowledge = warps_[warp];
    for (int i = 0; i <= static_cast<int>(scope); ++i) {
        if (!acquires) break;
        knowledge.past.join(knowledge.observed[i]);
        knowledge.observed[i].clear();
    }
    if (!releases) return;
    for (int i = 0; i <= static_cast<int>(scope); ++i) knowledge.fenced[i] = knowledge.past;
    advance(warp);
}

void HappensBefore::fence_proxy(uint32_t warp, bool shared, bool global) {
    Past& past = warps_[warp].past;
    if (shared) past.visible_shared = past.known;
    if (global) past.visible_global = past.known;
    advance(warp);
}

// It has ended, and all that it did is visible to this launch, whichever proxy looks.
void HappensBefore::wait_for_predecessor(uint32_t warp) {
    if (history_.predecessor().empty()) return;
    history_.has_waited_ = true;
    const Message all{{kPredecessor.key(), 1}};
    Past& past = warps_[warp].past;
    for (VectorClock* clock : {&past.known, &past.visible_shared, &past.visible_global}) clock->join(all, cluster_);
}

void HappensBefore::launch_dependents(uint32_t warp) {
    if (warps_[warp].past.known.other(kPredecessor) == 0) history_.lets_begin_early_ = true;
}

template <typename Function>
void HappensBefore::at_location(bool is_shared, uint64_t address, bool creates, Function&& function) {
    const auto apply = [&](auto& locations) {
        if (creates) return function(locations[address]);
        const auto found = locations.find(address);
        if (found != locations.end()) function(found->second);
    };
    if (is_shared) return apply(shared_locations_);
    if (creates) {
        history_.has_locations_ = true;
    } else if (!history_.has_locations_) {
        return;
    }
    LaunchHistory::Shard& shard = history_.shard(address / Page::kBytes);
    const std::lock_guard lock(shard.lock);
    apply(shard.locations);
}

void HappensBefore::write(uint32_t warp, bool is_shared, uint64_t address, Order order, Scope scope, bool is_atomic) {
    const bool releases = order == Order::kRelease || order == Order::kAcquireRelease;
    const Knowledge& knowledge = warps_[warp];
    const bool carries = releases || !knowledge.fenced[0].known.is_empty();
    at_location(is_shared, address, carries, [&](LaunchHistory::Location& location) {
        const uint64_t me = uint64_t{cluster_} << 32 | warp;
        // A release goes on through atomics, and through later writes of the same thread.
        const bool goes_on = is_atomic || location.last_writer == me;
        location.last_writer = me;
        for (int i = 0; i < kNumScopes; ++i) {
            LaunchHistory::Release& release = location.releases[i];
            const uint64_t owner = owner_of(static_cast<Scope>(i), warp);
            if (!goes_on || release.owner != owner) release = {};
            release.owner = owner;
            if (i > static_cast<int>(scope)) continue;
            const auto add = [&](const Past& past) {
                past.known.add_to(release.known, cluster_);
                past.visible_shared.add_to(release.visible_shared, cluster_);
                past.visible_global.add_to(release.visible_global, cluster_);
                past.over.add_to(release.over, cluster_);
            };
            add(knowledge.fenced[i]);
            if (releases) add(knowledge.past);
        }
    });
    if (releases) advance(warp);
}

void HappensBefore::read(uint32_t warp, bool is_shared, uint64_t address, Order order, Scope scope) {
    const bool acquires = order == Order::kAcquire || order == Order::kAcquireRelease;
    Knowledge& knowledge = warps_[warp];
    at_location(is_shared, address, false, [&](const LaunchHistory::Location& location) {
        for (int i = 0; i <= static_cast<int>(scope); ++i) {
            const LaunchHistory::Release& release = location.releases[i];
            if (release.owner != owner_of(static_cast<Scope>(i), warp)) continue;
            Past& past = acquires ? knowledge.past : knowledge.observed[i];
            past.known.join(release.known, cluster_);
            past.visible_shared.join(release.visible_shared, cluster_);
            past.visible_global.join(release.visible_global, cluster_);
            past.over.join(release.over, cluster_);
        }
    });
}

}  // namespace emulator
