// Vector clocks: how much of what each agent has done is known to have happened before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace emulator {

// An agent is a warp or an mbarrier: `component` counts them within their cluster.
struct Agent {
    uint32_t cluster, component;
    uint64_t key() const { return uint64_t{cluster} << 32 | component; }
};

// What is known of each agent of any cluster, sorted; of no cluster in particular, so that it can lie in memory.
using Message = std::vector<std::pair<uint64_t, uint32_t>>;

inline void join(Message& into, const Message& from) {
    if (from.empty()) return;
    Message merged;
    merged.reserve(into.size() + from.size());
    auto a = into.begin();
    for (const auto& entry : from) {
        while (a != into.end() && a->first < entry.first) merged.push_back(*a++);
        const bool is_same = a != into.end() && a->first == entry.first;
        merged.emplace_back(entry.first, is_same ? std::max(entry.second, a->second) : entry.second);
        a += is_same;
    }
    merged.insert(merged.end(), a, into.end());
    into.swap(merged);
}

// Dense for the agents of one's own cluster, sparse for those of other clusters, of which one has heard of few.
class VectorClock {
  public:
    bool is_empty() const { return own_.empty() && others_.empty(); }
    uint32_t own(uint32_t component) const { return component < own_.size() ? own_[component] : 0; }
    uint32_t other(Agent agent) const {
        const auto found = std::lower_bound(others_.begin(), others_.end(), std::pair(agent.key(), uint32_t{0}));
        return found != others_.end() && found->first == agent.key() ? found->second : 0;
    }
    void set_own(uint32_t component, uint32_t clock) {
        if (component >= own_.size()) own_.resize(component + 1);
        own_[component] = clock;
    }
    void join(const VectorClock& from) {
        if (own_.size() < from.own_.size()) own_.resize(from.own_.size());
        for (size_t i = 0; i < from.own_.size(); ++i) own_[i] = std::max(own_[i], from.own_[i]);
        emulator::join(others_, from.others_);
    }
    void join(const Message& from, uint32_t cluster) {
        Message others;
        for (const auto& [key, clock] : from) {
            const auto component = static_cast<uint32_t>(key);
            if (key >> 32 != cluster) {
                others.emplace_back(key, clock);
            } else if (own(component) < clock) {
                set_own(component, clock);
            }
        }
        emulator::join(others_, others);
    }
    void add_to(Message& into, uint32_t cluster) const {
        Message mine;
        for (uint32_t i = 0; i < own_.size(); ++i) {
            if (own_[i] != 0) mine.emplace_back(Agent{cluster, i}.key(), own_[i]);
        }
        emulator::join(into, mine);
        emulator::join(into, others_);
    }
    void clear() { own_.clear(), others_.clear(); }

  private:
    std::vector<uint32_t> own_;
    Message others_;
};

}  // namespace emulator
