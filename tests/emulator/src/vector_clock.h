// Vector clocks: the time up to which each agent's actions are known to have happened before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace emulator {

// A warp or an mbarrier. `component` numbers both within their cluster. Keys of lanes follow their warp's key.
struct Agent {
    uint32_t cluster, component;
    static constexpr int kLaneBits = 6;
    uint64_t key() const { return uint64_t{cluster} << 32 | uint64_t{component} << kLaneBits; }
    uint64_t key_of_lane(int lane) const { return key() + 1 + static_cast<uint64_t>(lane); }
    static uint64_t without_lane(uint64_t key) { return key >> kLaneBits << kLaneBits; }
    static uint32_t component_of(uint64_t key) { return static_cast<uint32_t>(key) >> kLaneBits; }
};

// A vector clock as (key, time) pairs, sorted by key. Unlike VectorClock it belongs to no cluster, so that it can be
// kept with global memory. A lane has an entry if more is known of it than of its whole warp.
using Message = std::vector<std::pair<uint64_t, uint32_t>>;

inline void join(Message& into, const Message& from) {
    if (from.empty()) return;
    Message merged;
    merged.reserve(into.size() + from.size());
    std::pair<uint64_t, uint32_t> whole{~uint64_t{0}, 0};
    const auto add = [&](uint64_t key, uint32_t clock) {
        if (Agent::without_lane(key) == key) {
            whole = {key, clock};
        } else if (Agent::without_lane(key) == whole.first && clock <= whole.second) {
            return;
        }
        merged.emplace_back(key, clock);
    };
    auto a = into.begin();
    for (const auto& entry : from) {
        for (; a != into.end() && a->first < entry.first; ++a) add(a->first, a->second);
        const bool is_same = a != into.end() && a->first == entry.first;
        add(entry.first, is_same ? std::max(entry.second, a->second) : entry.second);
        a += is_same;
    }
    for (; a != into.end(); ++a) add(a->first, a->second);
    into.swap(merged);
}

// A vector clock of one cluster. It is dense for the cluster's own agents, and sparse for their lanes and for the
// agents of other clusters, few of which are known.
class VectorClock {
  public:
    bool is_empty() const { return own_.empty() && lanes_.empty() && others_.empty(); }
    uint32_t own(uint32_t component) const { return component < own_.size() ? own_[component] : 0; }
    uint32_t other(Agent agent) const { return find(others_, agent.key()); }
    // Returns the lanes of a warp that have entries of their own and are known to have reached `clock`.
    uint32_t own_lanes(Agent warp, uint32_t clock) const { return lanes_in(lanes_, warp, clock); }
    uint32_t other_lanes(Agent warp, uint32_t clock) const { return lanes_in(others_, warp, clock); }
    void raise_own(uint32_t component, uint32_t clock) {
        if (component >= own_.size()) own_.resize(component + 1);
        own_[component] = std::max(own_[component], clock);
    }
    void raise_own_lane(Agent agent, int lane, uint32_t clock) {
        emulator::join(lanes_, {{agent.key_of_lane(lane), clock}});
    }
    void join(const VectorClock& from) {
        if (own_.size() < from.own_.size()) own_.resize(from.own_.size());
        for (size_t i = 0; i < from.own_.size(); ++i) own_[i] = std::max(own_[i], from.own_[i]);
        emulator::join(others_, from.others_);
        emulator::join(lanes_, from.lanes_);
        drop_covered_lanes();
    }
    void join(const Message& from, uint32_t cluster) {
        Message others, lanes;
        for (const auto& [key, clock] : from) {
            if (key >> 32 != cluster) {
                others.emplace_back(key, clock);
            } else if (Agent::without_lane(key) != key) {
                lanes.emplace_back(key, clock);
            } else {
                raise_own(Agent::component_of(key), clock);
            }
        }
        emulator::join(others_, others);
        emulator::join(lanes_, lanes);
        drop_covered_lanes();
    }
    void add_to(Message& into, uint32_t cluster) const {
        Message mine;
        for (uint32_t i = 0; i < own_.size(); ++i) {
            if (own_[i] != 0) mine.emplace_back(Agent{cluster, i}.key(), own_[i]);
        }
        emulator::join(into, mine);
        emulator::join(into, lanes_);
        emulator::join(into, others_);
    }
    void clear() { own_.clear(), lanes_.clear(), others_.clear(); }

  private:
    static uint32_t find(const Message& in, uint64_t key) {
        if (in.empty()) return 0;
        const auto found = std::lower_bound(in.begin(), in.end(), std::pair(key, uint32_t{0}));
        return found != in.end() && found->first == key ? found->second : 0;
    }
    static uint32_t lanes_in(const Message& in, Agent warp, uint32_t clock) {
        if (in.empty()) return 0;
        const uint64_t first = warp.key_of_lane(0);
        uint32_t lanes = 0;
        for (auto at = std::lower_bound(in.begin(), in.end(), std::pair(first, uint32_t{0}));
             at != in.end() && Agent::without_lane(at->first) == warp.key(); ++at) {
            if (at->second >= clock) lanes |= 1u << (at->first - first);
        }
        return lanes;
    }
    void drop_covered_lanes() {
        const auto is_covered = [&](const auto& entry) {
            return entry.second <= own(Agent::component_of(entry.first));
        };
        if (lanes_.empty()) return;
        lanes_.erase(std::remove_if(lanes_.begin(), lanes_.end(), is_covered), lanes_.end());
    }

    std::vector<uint32_t> own_;
    Message lanes_;   // lanes of the own cluster
    Message others_;  // agents and lanes of other clusters
};

}  // namespace emulator
