#include "access_history.h"

#include <new>

#include "fault.h"

namespace emulator {

// A full cell drops its oldest record, and with it only the conflicts that this record would have revealed.
void Cell::add(const Record& record) {
    if (count == kMost) {
        std::copy(many + 1, many + count, many);
        --count;
    } else if (count == capacity) {
        auto* larger = static_cast<Record*>(std::malloc(sizeof(Record) * capacity * 2));
        if (larger == nullptr) throw std::bad_alloc();
        std::copy(records(), records() + count, larger);
        std::free(many);
        many = larger;
        capacity *= 2;
    }
    records()[count++] = record;
}

// The table is large and mostly unused. Pages of calloc take no memory until they are touched.
AsyncOperations::AsyncOperations()
    : chunks_(static_cast<std::atomic<Operation*>*>(std::calloc(kMostChunks, sizeof(std::atomic<Operation*>)))) {
    if (chunks_ == nullptr) throw std::bad_alloc();
}

AsyncOperations::~AsyncOperations() {
    for (uint32_t i = 0; i < num_chunks_; ++i) delete[] chunks_[i].load();
    std::free(chunks_);
}

uint32_t AsyncOperations::take_chunk() {
    const uint32_t chunk = num_chunks_++;
    if (chunk >= kMostChunks) {
        --num_chunks_;
        throw Fault("limit", "more asynchronous operations in a launch than the race detector can follow: races=False");
    }
    chunks_[chunk].store(new Operation[kChunk]{}, std::memory_order_release);
    return chunk * kChunk;
}

void AsyncOperations::keep(std::deque<Completion>&& completions) {
    if (completions.empty()) return;
    const std::lock_guard lock(mutex_);
    kept_.push_back(std::move(completions));
}

}  // namespace emulator
