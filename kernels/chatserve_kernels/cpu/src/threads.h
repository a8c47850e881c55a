// A pool of compute threads for loops of a few microseconds.
//
// Iterations are claimed one by one from atomic tickets, so a thread that the system has taken off its core delays only
// the iteration it holds, and one that still sleeps delays nothing. The caller works too. One caller at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cs {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

constexpr int64_t kTokensPerTask = 8;  // of work that costs about half a microsecond each

class ThreadPool {
 public:
  explicit ThreadPool(int threads) : tickets_(size_t(std::max(threads, 1))) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(size_t(i)); });
  }

  ~ThreadPool() {
    stop_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return int(workers_.size()) + 1; }

  // body(i) for every i in [0, count), in any order, on any thread; returns when all are done. They are begun in order.
  template <class F>
  void run(int count, const F& body) {
    run_on(1, count, body);
  }

  // As run(), but each thread goes through a range of its own before it takes from the ends of others': for iterations
  // that read memory one after another, which each thread's prefetchers then follow.
  template <class F>
  void run_ranges(int count, const F& body) {
    run_on(tickets_.size(), count, body);
  }

  // body(token) for every token in [0, count): see kTokensPerTask.
  template <class F>
  void run_tokens(int64_t count, const F& body) {
    run(int((count + kTokensPerTask - 1) / kTokensPerTask), [&](int task) {
      const int64_t end = count < (task + 1) * kTokensPerTask ? count : (task + 1) * kTokensPerTask;
      for (int64_t token = task * kTokensPerTask; token < end; ++token) body(token);
    });
  }

 private:
  using Call = void (*)(const void*, int);

  // A worker spins about 100 µs before it sleeps: longer than any gap inside a step, shorter than what a process
  // waiting for the core would notice.
  static constexpr int kSpins = 2000;
  static constexpr int kIndexBits = 20;
  static constexpr uint64_t kIndexMask = (uint64_t(1) << kIndexBits) - 1;

  // A ticket holds (whether all take from the front, generation, end, next index) of a range. A claim is one
  // compare-and-swap of the whole ticket, so it can only succeed for a loop that is still unfinished, whose body_ and
  // call_ are therefore still in place.
  struct alignas(64) Ticket {
    std::atomic<uint64_t> range{0};
  };
  static constexpr uint64_t kInOrder = uint64_t(1) << 63;
  static uint64_t next_of(uint64_t range) { return range & kIndexMask; }
  static uint64_t end_of(uint64_t range) { return (range >> kIndexBits) & kIndexMask; }

  template <class F>
  void run_on(size_t ranges, int count, const F& body) {
    if (count <= 1 || workers_.empty()) {
      for (int i = 0; i < count; ++i) body(i);
      return;
    }
    body_.store(&body, std::memory_order_relaxed);
    call_.store([](const void* f, int i) { (*static_cast<const F*>(f))(i); }, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    for (size_t r = 0; r < ranges; ++r) {
      std::atomic<uint64_t>& range = tickets_[r].range;
      const uint64_t generation = (range.load(std::memory_order_relaxed) >> (2 * kIndexBits)) + 1;
      const uint64_t begin = uint64_t(count) * r / ranges, end = uint64_t(count) * (r + 1) / ranges;
      const uint64_t fresh = (generation << (2 * kIndexBits) | end << kIndexBits | begin) & ~kInOrder;
      range.store(ranges == 1 ? fresh | kInOrder : fresh, std::memory_order_seq_cst);
    }
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    epoch_.notify_all();
    work(0);
    for (int spins = 0; done_.load(std::memory_order_acquire) != uint32_t(count); ++spins) {
      if (spins < kSpins) relax();
      else std::this_thread::yield();
    }
  }

  bool has_work() const {
    for (const Ticket& ticket : tickets_) {
      const uint64_t range = ticket.range.load(std::memory_order_acquire);
      if (next_of(range) < end_of(range)) return true;
    }
    return false;
  }

  // What was done is told once, at the end: threads that tell each other of every iteration wait for each other.
  void work(size_t self) {
    uint32_t done = 0;
    for (size_t i = 0; i < tickets_.size(); ++i) {
      const size_t owner = (self + i) % tickets_.size();
      while (claim(tickets_[owner].range, owner == self)) ++done;
    }
    if (done > 0) done_.fetch_add(done, std::memory_order_release);
  }

  bool claim(std::atomic<uint64_t>& range, bool own) {
    uint64_t seen = range.load(std::memory_order_acquire);
    while (next_of(seen) < end_of(seen)) {
      const void* body = body_.load(std::memory_order_relaxed);
      const Call call = call_.load(std::memory_order_relaxed);
      const bool first = own || (seen & kInOrder) != 0;
      const uint64_t index = first ? next_of(seen) : end_of(seen) - 1;
      const uint64_t rest = first ? seen + 1 : seen - (uint64_t(1) << kIndexBits);
      if (range.compare_exchange_strong(seen, rest, std::memory_order_acq_rel)) {
        call(body, int(index));
        return true;
      }
    }
    return false;
  }

  void serve(size_t self) {
    while (!stop_.load(std::memory_order_relaxed)) {
      const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
      for (int spins = 0; spins < kSpins && !has_work(); ++spins) relax();
      if (has_work()) work(self);
      // Whoever has seen the destructor's epoch sees its stop as well; waiting for a later one would be for ever.
      else if (!stop_.load(std::memory_order_relaxed)) epoch_.wait(epoch);
    }
  }

  std::vector<Ticket> tickets_;
  std::vector<std::thread> workers_;
  std::atomic<const void*> body_{nullptr};
  std::atomic<Call> call_{nullptr};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace cs
