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
                record.lanes = 1;
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
    constexpr size_t kMostPages = 4096;  // 64 MB of records
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

HappensBefore::HappensBefore(LaunchHistory& history, std::vector<std::array<uint32_t, 3>> ctas,
                             const std::vector<uint32_t>& lanes, int64_t shared_bytes)
    : history_(history),
      warps_per_cta_(static_cast<uint32_t>(lanes.size())),
      num_components_(static_cast<uint32_t>(ctas.size()) * warps_per_cta_) {
    const size_t num_ctas = ctas.size();
    warps_.resize(num_components_);
    for (uint32_t i = 0; i < num_components_; ++i) warps_[i].lanes = warps_[i].live = lanes[i % warps_per_cta_];
    for (size_t i = 0; i < num_ctas; ++i) shared_.emplace_back((shared_bytes + Cell::kBytes - 1) / Cell::kBytes);
    barriers_.resize(num_ctas * kNumBarriers);
    exited_.resize(num_ctas);
    over_.resize(num_ctas);
    cluster_ = history.add_cluster(std::move(ctas), warps_per_cta_);
}

HappensBefore::~HappensBefore() {
    history_.operations_.keep(std::move(completions_));
}

// --- Knowledge of lanes, releases and acquires.

template <typename Function>
void HappensBefore::each_known(const Lanes& who, Function&& function) const {
    const Warp& warp = warps_[who.warp];
    function(warp.known);
    for (const Warp::Part& part : warp.parts) {
        if ((part.lanes & who.mask) != 0) function(part.known);
    }
}

void HappensBefore::add_own(VectorClock& clock, const Lanes& who, uint32_t time) const {
    if (who.mask == warps_[who.warp].lanes) return clock.raise_own(who.warp, time);
    each_lane(who.mask, [&](int lane) { clock.raise_own_lane({cluster_, who.warp}, lane, time); });
}

// Publishes all that these lanes know and have done; without `releases`, only as of their last fence of that scope.
void HappensBefore::release(Knowledge& into, const Lanes& who, bool releases, Scope scope) const {
    const int fence = static_cast<int>(scope);
    const Warp& warp = warps_[who.warp];
    each_known(who, [&](const Knowledge& known) {
        if (releases)
            into.join(known);
        else
            into.past.join(known.fenced[fence]);
    });
    if (!releases) {
        if (warp.fenced_at[fence] != 0) add_own(into.past.known, who, warp.fenced_at[fence]);
        return;
    }
    add_own(into.past.known, who, warp.time);
    for (int i = 0; i < kNumScopes; ++i) {
        if (warp.fenced_at[i] != 0) add_own(into.fenced[i].known, who, warp.fenced_at[i]);
    }
}

// Returns where to store what these lanes learn.
Knowledge& HappensBefore::shared_by(const Lanes& who) {
    Warp& warp = warps_[who.warp];
    if (is_whole(who)) return warp.known;
    for (Warp::Part& part : warp.parts) {
        if (part.lanes == who.mask) return part.known;
    }
    return warp.parts.emplace_back(Warp::Part{who.mask, {}}).known;
}

// Drops the parts that only these lanes know. The caller makes all of the lanes acquire them next.
void HappensBefore::forget_parts(const Lanes& who) {
    Warp& warp = warps_[who.warp];
    const auto is_covered = [&](const Warp::Part& part) { return (part.lanes & warp.live & ~who.mask) == 0; };
    warp.parts.erase(std::remove_if(warp.parts.begin(), warp.parts.end(), is_covered), warp.parts.end());
}

void HappensBefore::synchronise(const Lanes& who) {
    Warp& warp = warps_[who.warp];
    if (warp.parts.empty() && who.mask == warp.lanes) {  // all lanes know the same, except of each other
        warp.known.past.known.raise_own(who.warp, warp.time);
        for (int i = 0; i < kNumScopes; ++i) {
            if (warp.fenced_at[i] != 0) warp.known.fenced[i].known.raise_own(who.warp, warp.fenced_at[i]);
        }
        advance(who.warp);
        return;
    }
    Knowledge meeting;
    release(meeting, who);
    forget_parts(who);
    acquire(who, meeting);
    advance(who.warp);
}

uint32_t HappensBefore::unknown_in(const VectorClock& clock, Agent agent, uint32_t lanes, uint32_t time) const {
    const bool is_own = agent.cluster == cluster_;
    if ((is_own ? clock.own(agent.component) : clock.other(agent)) >= time) return 0;
    return lanes & ~(is_own ? clock.own_lanes(agent, time) : clock.other_lanes(agent, time));
}

uint32_t HappensBefore::unknown_to(const Lanes& who, VectorClock Past::* clock, Agent agent, uint32_t lanes,
                                   uint32_t time) const {
    const bool is_own = clock == &Past::known && agent.component == who.warp && agent.cluster == cluster_;
    if (is_own) lanes &= ~who.mask;
    if (lanes == 0) return 0;
    each_known(who, [&](const Knowledge& known) {
        if (lanes != 0) lanes = unknown_in(known.past.*clock, agent, lanes, time);
    });
    return lanes;
}

template <typename Function>
uint32_t HappensBefore::unknown_parts(AsyncId id, uint32_t lanes, Function&& unknown) const {
    const Completion* completion = history_.operations_.at(id).completions.load(std::memory_order_acquire);
    for (; completion != nullptr && lanes != 0; completion = completion->next) {
        const uint32_t covered = completion->lanes & lanes;
        const uint32_t waiter = completion->waiters &
                                -completion->waiters;  // one waiter suffices: whoever knows of it knows the completion
        if (waiter == 0) {
            lanes &= ~covered | unknown(completion->agent, covered, completion->clock);
        } else if (unknown(completion->agent, waiter, completion->clock) == 0) {
            lanes &= ~covered;
        }
    }
    return lanes;
}

template <typename Function>
uint32_t HappensBefore::unknown_lanes(const Record& record, Function&& unknown) const {
    if (record.has(Record::kAsync)) return unknown_parts(AsyncId{record.clock}, record.lanes, unknown);
    return unknown({record.cluster, record.warp}, record.lanes, record.clock);
}

// --- Accesses.

// Returns true if both accesses are strong and the scope of each includes the other.
bool HappensBefore::are_morally_strong(const Record& a, const Record& b) const {
    if (!a.has(Record::kStrong) || !b.has(Record::kStrong)) return false;
    const Scope needed = a.cluster != b.cluster                               ? Scope::kGpu
                         : a.warp / warps_per_cta_ != b.warp / warps_per_cta_ ? Scope::kCluster
                                                                              : Scope::kCta;
    return std::min(a.scope(), b.scope()) >= static_cast<int>(needed);
}

namespace {

// Returns true if warps store the same value by the same instruction.
bool is_replicated(const Record& earlier, const Record& later) {
    return later.has(Record::kSilent) && earlier.has(Record::kWrite) && !earlier.has(Record::kAsync) &&
           earlier.operation() == later.operation();
}

// Returns true if it is enough to know that an access is over: it wrote nothing, or its completion has cluster scope.
bool leaves_nothing_to_see(const Record& record) {
    return !record.has(Record::kWrite) ||
           (record.has(Record::kAsync) && record.scope() > static_cast<int>(Scope::kCta));
}

}  // namespace

// Checks an access against a cell's records and adds its record. `by`: the lanes that make it or start its operation.
void HappensBefore::touch(Cell& cell, Record now, const Lanes& by, bool is_shared, uint64_t address) {
    const bool is_write = now.has(Record::kWrite);
    const VectorClock& known = warps_[by.warp].known.past.known;
    const auto unknown_of = [&](const Record& record, VectorClock Past::* clock) {
        return unknown_lanes(record, [&](Agent agent, uint32_t lanes, uint32_t time) {
            return unknown_to(by, clock, agent, lanes, time);
        });
    };
    Record* const records = cell.records();
    uint32_t kept = 0;
    for (uint32_t i = 0; i < cell.count; ++i) {
        Record& record = records[i];
        const uint32_t both = record.bytes & now.bytes;
        if (both != 0) {
            const auto conflict = [&](Conflict::Kind kind, uint32_t lanes) {
                record.lanes = lanes;
                return history_.fault({kind, record, now, is_shared, address + __builtin_ctz(both)});
            };
            const bool is_in_step = record.warp == by.warp && record.cluster == cluster_ &&
                                    !record.has(Record::kAsync) && !now.has(Record::kAsync) &&
                                    record.clock >= by.in_step_since && (record.lanes & ~by.in_step) == 0;
            if (is_in_step && record.bytes == now.bytes && record.is_by_same_instruction(now)) {
                now.lanes |= record.lanes;  // one record serves all lanes in step of an instruction
                continue;
            }
            const bool is_same_operation =
                now.has(Record::kAsync) && record.has(Record::kAsync) && record.clock == now.clock;
            const bool may_race = is_write || record.has(Record::kWrite);
            const bool is_known = is_same_operation || (!record.has(Record::kAsync) && record.cluster == cluster_ &&
                                                        known.own(record.warp) >= record.clock);
            uint32_t unknown = is_known ? 0 : unknown_of(record, &Past::known);
            bool is_over = false;  // true: over, though what it wrote may not be visible
            if (unknown != 0 && may_race && !is_in_step) {
                Record rest = record;
                rest.lanes = unknown;
                is_over = unknown_of(rest, &Past::over) == 0;
                // The async proxy may overwrite shared memory that it cannot see, if the writer passed a proxy fence.
                const bool is_replaced = is_shared && is_write && now.has(Record::kAsyncProxy) &&
                                         unknown_of(record, &Past::visible_shared) == 0;
                if (is_over && (is_replaced || leaves_nothing_to_see(record))) unknown = 0;
            }
            if (unknown == 0) {
                const bool crosses = !record.has(Record::kAsyncProxy) && now.has(Record::kAsyncProxy);
                const bool keeps_reads = crosses && history_.strict_proxy_reads;
                if ((crosses && record.has(Record::kWrite)) || (keeps_reads && is_write)) {
                    uint32_t unfenced = unknown_of(record, is_shared ? &Past::visible_shared : &Past::visible_global);
                    if (unfenced != 0 && is_shared && !record.has(Record::kWrite)) {
                        Record rest = record;
                        rest.lanes = unfenced;
                        unfenced = unknown_of(rest, &Past::over_visible);
                    }
                    if (unfenced != 0) throw conflict(Conflict::Kind::kNeedsProxyFence, unfenced);
                }
                // The old record is redundant: a later access that conflicts with it conflicts with the new one too.
                if (is_write || (!record.has(Record::kWrite) && !keeps_reads)) {
                    record.bytes &= static_cast<uint16_t>(~now.bytes);
                }
            } else if (is_in_step) {
                const bool is_replaced = is_write || !record.has(Record::kWrite);
                if (is_replaced && (record.bytes & ~now.bytes) == 0) record.lanes = unknown;
            } else if (record.has(Record::kSum) && now.has(Record::kSum)) {
                throw conflict(Conflict::Kind::kOpenSum, unknown);
            } else if (may_race && !are_morally_strong(record, now) && !is_replicated(record, now)) {
                throw conflict(is_over ? Conflict::Kind::kTooNarrow : Conflict::Kind::kUnordered, unknown);
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

// Calls function(address of the cell, mask of its bytes) for each cell of a range.
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

void HappensBefore::touch_shared(Record now, const Lanes& by, uint32_t rank, uint64_t offset, uint64_t bytes) {
    std::vector<Cell>& cells = shared_[rank];
    if (offset + bytes > cells.size() * Cell::kBytes) return;  // out of bounds: reported elsewhere
    each_cell(offset, bytes, [&](uint64_t start, uint16_t mask) {
        now.bytes = mask;
        touch(cells[start / Cell::kBytes], now, by, true, uint64_t{rank} << 32 | start);
    });
}

void HappensBefore::touch_global(Record now, const Lanes& by, uint64_t address, uint64_t bytes) {
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

Record HappensBefore::record_of(const Lanes& by, const Touch& touch) const {
    const uint32_t flags = (touch.is_write ? Record::kWrite : 0) | (touch.is_strong ? Record::kStrong : 0) |
                           static_cast<uint32_t>(touch.scope) << Record::kScopeShift |
                           (touch.is_silent ? Record::kSilent : 0) | (touch.is_sum ? Record::kSum : 0);
    return {time(by.warp),
            touch.operation << Record::kOperationShift | flags,
            cluster_,
            by.mask,
            static_cast<uint16_t>(by.warp),
            0};
}

Record HappensBefore::record_of(AsyncId id, const Lanes& by, const Touch& touch) {
    Record record = record_of(by, touch);
    record.clock = static_cast<uint32_t>(id);
    record.place |= Record::kAsync | (operation(id).proxy == Proxy::kAsync ? Record::kAsyncProxy : 0);
    return record;
}

// --- Asynchronous operations.

AsyncId HappensBefore::start(Proxy proxy) {
    if (next_operation_ % AsyncOperations::kChunk == 0) next_operation_ = history_.operations_.take_chunk();
    const AsyncId id{next_operation_++};
    operation(id).proxy = proxy;
    return id;
}

void HappensBefore::add_completion(AsyncId id, uint32_t component, uint32_t time, uint32_t lanes, uint32_t waiters) {
    auto& completions = operation(id).completions;
    completions_.push_back({{cluster_, component}, time, lanes, waiters, completions.load(std::memory_order_relaxed)});
    completions.store(&completions_.back(), std::memory_order_release);
}

bool HappensBefore::is_known_complete(AsyncId id, uint32_t warp, uint32_t lanes) const {
    return unknown_parts(id, lanes, [&](Agent agent, uint32_t of, uint32_t time) {
               return unknown_in(warps_[warp].known.past.known, agent, of, time);
           }) == 0;
}

void HappensBefore::complete_into_mbarrier(AsyncId id, uint32_t rank, uint64_t offset, uint32_t lanes) {
    const MbarrierAgent& agent = mbarrier(rank, offset);
    add_completion(id, agent.component, agent.phase + 1, lanes, 1);
}

// --- Barriers.

void HappensBefore::init_mbarrier(uint32_t rank, uint64_t offset) {
    reset(mbarrier(rank, offset));
}

void HappensBefore::reset(MbarrierAgent& agent) {
    agent = {};
    agent.component = num_components_++;
    agent.pending.by_cta.resize(shared_.size());
    agent.completed.by_cta.resize(shared_.size());
}

void HappensBefore::arrive_at_mbarrier(const Lanes& who, uint32_t rank, uint64_t offset, bool releases, Scope scope) {
    Arrivals& pending = mbarrier(rank, offset).pending;
    release(pending.by_cta[rank_of(who.warp)], who, releases, Scope::kCta);
    if (scope != Scope::kCta && pending.by_cta.size() > 1) release(pending.wide, who, releases, scope);
    advance(who.warp);
}

// Knowledge accumulates over phases, because whoever sees a phase complete knows that all earlier phases were.
void HappensBefore::complete_phase(uint32_t rank, uint64_t offset) {
    MbarrierAgent& agent = mbarrier(rank, offset);
    for (size_t i = 0; i < agent.pending.by_cta.size(); ++i) agent.completed.by_cta[i].join(agent.pending.by_cta[i]);
    if (shared_.size() > 1) agent.completed.wide.join(agent.pending.wide);
    ++agent.phase;
}

void HappensBefore::wait_for_mbarrier(const Lanes& who, uint32_t rank, uint64_t offset, bool acquires, Scope scope) {
    const MbarrierAgent& agent = mbarrier(rank, offset);
    Knowledge& knowledge = shared_by(who);
    const auto see = [&](const Knowledge& completed, Scope by) {
        if (acquires) return knowledge.join(completed);
        knowledge.observed[static_cast<int>(by)].join(completed.past);
    };
    see(agent.completed.by_cta[rank_of(who.warp)], Scope::kCta);
    if (scope != Scope::kCta) see(agent.completed.wide, scope);
    Past& past = acquires ? knowledge.past : knowledge.observed[static_cast<int>(Scope::kCta)];
    for (size_t i = 0; i < agent.completed.by_cta.size(); ++i) {
        if (i != rank_of(who.warp)) past.join_over(agent.completed.by_cta[i].past);
    }
    past.known.raise_own(agent.component, agent.phase);  // the copies that the mbarrier counted are complete
}

void HappensBefore::arrive_at_barrier(const Lanes& who, int id) {
    release(barriers_[rank_of(who.warp) * kNumBarriers + id], who);
    advance(who.warp);
}

void HappensBefore::leave_barrier(const Lanes& who, int id, bool is_for_all) {
    const uint32_t rank = rank_of(who.warp);
    forget_parts(who);
    acquire(who, barriers_[rank * kNumBarriers + id]);
    if (is_for_all) acquire(who, exited_[rank]);
}

void HappensBefore::exit(const Lanes& who) {
    release(exited_[rank_of(who.warp)], who);
    release(cluster_exited_, who);
    warps_[who.warp].live &= ~who.mask;
}

void HappensBefore::arrive_at_cluster(const Lanes& who, bool releases) {
    each_known(who, [&](const Knowledge& known) { cluster_arrived_.join(known.past.known); });
    add_own(cluster_arrived_, who, time(who.warp));
    release(cluster_pending_, who, releases);
    advance(who.warp);
}

void HappensBefore::complete_cluster() {
    cluster_completed_ = std::move(cluster_pending_);
    cluster_pending_ = {};
    cluster_completed_.join(cluster_exited_);
    cluster_left_ = cluster_arrived_;
}

void HappensBefore::leave_cluster(const Lanes& who) {
    acquire(who, cluster_completed_);
    over_[rank_of(who.warp)].join(cluster_left_);
}

void HappensBefore::end(uint32_t rank) {
    for (size_t i = 0; i < shared_[rank].size(); ++i) {
        Cell& cell = shared_[rank][i];
        for (uint32_t j = 0; j < cell.count; ++j) {
            const Record& record = cell.records()[j];
            const bool is_own = rank_of(record.warp) == rank && !record.has(Record::kAsyncProxy);
            const auto unknown = [&](Agent agent, uint32_t lanes, uint32_t time) {
                const Past& past = exited_[rank].past;
                lanes = unknown_in(past.known, agent, lanes, time);
                if (lanes != 0 && leaves_nothing_to_see(record)) lanes = unknown_in(past.over, agent, lanes, time);
                return lanes == 0 ? 0 : unknown_in(over_[rank], agent, lanes, time);
            };
            if (is_own || unknown_lanes(record, unknown) == 0) continue;
            const uint64_t address = uint64_t{rank} << 32 | (i * Cell::kBytes + __builtin_ctz(record.bytes));
            throw history_.fault({Conflict::Kind::kBeyondEnd, record, record, true, address});
        }
    }
}

// --- Fences, releases and acquires.

void HappensBefore::fence(const Lanes& who, Scope scope, bool acquires, bool releases) {
    const int widest = static_cast<int>(scope);
    Warp& warp = warps_[who.warp];
    const auto pass = [&](Knowledge& known) {
        for (int i = 0; i <= widest && acquires; ++i) known.past.join(known.observed[i]), known.observed[i].clear();
        for (int i = 0; i <= widest && releases; ++i) known.fenced[i] = known.past;
    };
    if (is_whole(who)) {
        pass(warp.known);
        for (Warp::Part& part : warp.parts) pass(part.known);
        for (int i = 0; i <= widest && releases; ++i) warp.fenced_at[i] = warp.time;
    } else {
        each_lane(who.mask, [&](int lane) {
            const Lanes one{who.warp, 1u << lane};
            Knowledge all;
            each_known(one, [&](const Knowledge& known) { all.join(known); });
            add_own(all.past.known, one, warp.time);
            pass(all);
            acquire(one, all);
        });
    }
    advance(who.warp);
}

void HappensBefore::fence_proxy(const Lanes& who, bool shared, bool other_ctas, bool global) {
    VectorClock known, over;
    each_known(who, [&](const Knowledge& part) {
        known.join(part.past.known);
        over.join(part.past.over);
    });
    add_own(known, who, time(who.warp));
    Past& past = shared_by(who).past;
    if (shared) past.visible_shared.join(known);
    if (other_ctas) past.over_visible.join(over);
    if (global) past.visible_global.join(known);
    advance(who.warp);
}

// The predecessor has ended, and all that it did is visible to both proxies.
void HappensBefore::wait_for_predecessor(const Lanes& who) {
    if (history_.predecessor().empty()) return;
    history_.has_waited_ = true;
    const Message all{{kPredecessor.key(), 1}};
    Past& past = shared_by(who).past;
    for (VectorClock* clock : {&past.known, &past.visible_shared, &past.visible_global}) clock->join(all, cluster_);
}

void HappensBefore::launch_dependents(const Lanes& who) {
    bool has_waited = false;
    each_known(who, [&](const Knowledge& known) { has_waited |= known.past.known.other(kPredecessor) != 0; });
    if (!has_waited) history_.lets_begin_early_ = true;
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

void HappensBefore::write(const Lanes& who, bool is_shared, uint64_t address, Order order, Scope scope,
                          bool is_atomic) {
    const bool releases = order == Order::kRelease || order == Order::kAcquireRelease;
    bool carries = releases || warps_[who.warp].fenced_at[0] != 0;
    each_known(who, [&](const Knowledge& known) { carries = carries || !known.fenced[0].known.is_empty(); });
    Knowledge mine;
    if (carries) release(mine, who);
    at_location(is_shared, address, carries, [&](LaunchHistory::Location& location) {
        const uint64_t me = Agent{cluster_, who.warp}.key_of_lane(__builtin_ctz(who.mask));
        // A release sequence continues through atomics, and through later writes of the same thread.
        const bool goes_on = is_atomic || location.last_writer == me;
        location.last_writer = me;
        for (int i = 0; i < kNumScopes; ++i) {
            LaunchHistory::Release& release = location.releases[i];
            const uint64_t owner = owner_of(static_cast<Scope>(i), who.warp);
            if (!goes_on || release.owner != owner) release = {};
            release.owner = owner;
            if (i > static_cast<int>(scope)) continue;
            const auto add = [&](const Past& past) {
                past.known.add_to(release.known, cluster_);
                past.visible_shared.add_to(release.visible_shared, cluster_);
                past.visible_global.add_to(release.visible_global, cluster_);
                past.over.add_to(release.over, cluster_);
                past.over_visible.add_to(release.over_visible, cluster_);
            };
            add(mine.fenced[i]);
            if (releases) add(mine.past);
        }
    });
    if (releases) advance(who.warp);
}

void HappensBefore::read(const Lanes& who, bool is_shared, uint64_t address, Order order, Scope scope) {
    const bool acquires = order == Order::kAcquire || order == Order::kAcquireRelease;
    at_location(is_shared, address, false, [&](const LaunchHistory::Location& location) {
        for (int i = 0; i <= static_cast<int>(scope); ++i) {
            const LaunchHistory::Release& release = location.releases[i];
            if (release.owner != owner_of(static_cast<Scope>(i), who.warp) || release.known.empty()) continue;
            Knowledge& knowledge = shared_by(who);
            Past& past = acquires ? knowledge.past : knowledge.observed[i];
            past.known.join(release.known, cluster_);
            past.visible_shared.join(release.visible_shared, cluster_);
            past.visible_global.join(release.visible_global, cluster_);
            past.over.join(release.over, cluster_);
            past.over_visible.join(release.over_visible, cluster_);
        }
    });
}

}  // namespace emulator
