// Computes where lanes that diverge at a branch reconverge: at the branch's immediate post-dominator (Cooper, Harvey
// and Kennedy, "A simple, fast dominance algorithm", on the reversed graph of instructions).
#include <algorithm>

#include "decoder.h"
#include "families/control.h"

namespace emulator {

void find_joins(Program& program, const FunctionCode& code) {
    const int count = code.end - code.first + 1, last = count - 1;
    std::vector<std::vector<int>> successors(count), predecessors(count);
    for (int i = 0; i < last; ++i) {
        for (const int next : successors_of(program, code, code.first + i)) {
            successors[i].push_back(next - code.first);
            predecessors[next - code.first].push_back(i);
        }
    }
    // Computes the post-order of the reversed graph, starting at the function's end.
    std::vector<int> order, number(count, -1);
    std::vector<std::pair<int, size_t>> stack{{last, 0}};
    std::vector<bool> seen(count, false);
    seen[last] = true;
    while (!stack.empty()) {
        auto& [node, child] = stack.back();
        if (child < predecessors[node].size()) {
            const int next = predecessors[node][child++];
            if (!seen[next]) seen[next] = true, stack.emplace_back(next, 0);
        } else {
            number[node] = static_cast<int>(order.size());
            order.push_back(node);
            stack.pop_back();
        }
    }
    std::vector<int> post_dominator(count, -1);
    post_dominator[last] = last;
    for (bool changed = true; changed;) {
        changed = false;
        for (auto node = order.rbegin(); node != order.rend(); ++node) {
            if (*node == last) continue;
            int best = -1;
            for (int next : successors[*node]) {
                if (number[next] < 0 || post_dominator[next] < 0) continue;
                if (best < 0) {
                    best = next;
                    continue;
                }
                while (best != next) {
                    while (number[best] < number[next]) best = post_dominator[best];
                    while (number[next] < number[best]) next = post_dominator[next];
                }
            }
            if (best >= 0 && post_dominator[*node] != best) post_dominator[*node] = best, changed = true;
        }
    }
    for (int i = 0; i < last; ++i) {
        // Code that never ends has no post-dominator; its lanes would reconverge at the function's end.
        program.operations[code.first + i].join = post_dominator[i] < 0 ? code.end : code.first + post_dominator[i];
    }
}

}  // namespace emulator
