// A pool of compute threads for loops of a few microseconds.
//
// Iterations are claimed one by one from an atomic ticket, so a thread that the system has taken off its core delays
// only the iteration it holds, and one that still sleeps delays nothing. The caller works too. One caller at a time.
#pragma once

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
  explicit ThreadPool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
  }

  ~ThreadPool() {
    stop_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return int(workers_.size()) + 1; }

  // body(i) for every i in [0, count), in any order, on any thread; returns when all are done.
  template <class F>
  void run(int count, const F& body) {
    if (count <= 1 || workers_.empty()) {
      for (int i = 0; i < count; ++i) body(i);
      return;
    }
    body_.store(&body, std::memory_order_relaxed);
    call_.store([](const void* f, int i) { (*static_cast<const F*>(f))(i); }, std::memory_order_relaxed);
    publish(uint64_t(count));
    work();
    for (int spins = 0; done_.load(std::memory_order_acquire) != uint32_t(count); ++spins) {
      if (spins < kSpins) relax();
      else std::this_thread::yield();
    }
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

  // The ticket holds (generation, count, next index). A claim is one compare-and-swap of the whole ticket, so it can
  // only succeed for a loop that is still unfinished, whose body_ and call_ are therefore still in place.
  void publish(uint64_t count) {
    done_.store(0, std::memory_order_relaxed);
    const uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> (2 * kIndexBits)) + 1;
    ticket_.store(generation << (2 * kIndexBits) | count << kIndexBits, std::memory_order_seq_cst);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    epoch_.notify_all();
  }

  bool has_work() const {
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    return (ticket & kIndexMask) < ((ticket >> kIndexBits) & kIndexMask);
  }

  void work() {
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      const uint64_t index = ticket & kIndexMask;
      if (index >= ((ticket >> kIndexBits) & kIndexMask)) return;
      const void* body = body_.load(std::memory_order_relaxed);
      const Call call = call_.load(std::memory_order_relaxed);
      if (ticket_.compare_exchange_strong(ticket, ticket + 1, std::memory_order_acq_rel)) {
        call(body, int(index));
        done_.fetch_add(1, std::memory_order_release);
      }
    }
  }

  void serve() {
    while (!stop_.load(std::memory_order_relaxed)) {
      const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
      for (int spins = 0; spins < kSpins && !has_work(); ++spins) relax();
      if (has_work()) work();
      // Whoever has seen the destructor's epoch sees its stop as well; waiting for a later one would be for ever.
      else if (!stop_.load(std::memory_order_relaxed)) epoch_.wait(epoch);
    }
  }

  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<const void*> body_{nullptr};
  std::atomic<Call> call_{nullptr};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace cs
