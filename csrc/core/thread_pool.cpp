#include "core/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <stdexcept>
#include <utility>

#include "core/error.h"

namespace surogate {

namespace {

constexpr std::uint64_t kInside = 0xFFFF;  // threads inside the job
constexpr std::uint64_t kOpen = 0x10000;   // the job may be joined
constexpr std::uint64_t kEpoch = 0x20000;  // one step of the job's number
constexpr std::uint64_t kEpochMask = ~(kEpoch - 1);
constexpr int kSpins = 400;   // some ten microseconds: as long as it takes to get from one operation to the next
constexpr int kYields = 100;  // then others may have the core

thread_local const ThreadPool* inside_pool = nullptr;

/// Waits in growing politeness until `ready()`; false when it gave up and the caller should sleep.
template <typename Ready>
bool wait_awake(const Ready& ready) {
    for (int i = 0; i < kSpins; ++i) {
        if (ready()) return true;
        ThreadPool::pause();
    }
    for (int i = 0; i < kYields; ++i) {
        if (ready()) return true;
        ::sched_yield();
    }
    return ready();
}

int usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
        const int cores = CPU_COUNT(&set);
        if (cores > 0) return cores;
    }
    const unsigned cores = std::thread::hardware_concurrency();
    return cores == 0 ? 1 : static_cast<int>(cores);
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
    if (threads < 0 || threads > 1024) fail("ThreadPool: threads: expected 0 to 1024, got ", threads);
    size_ = threads == 0 ? usable_cores() : threads;
    process_ = static_cast<int>(::getpid());
    scratch_.resize(static_cast<std::size_t>(size_));
    threads_.reserve(static_cast<std::size_t>(size_ - 1));
    try {
        for (int worker = 1; worker < size_; ++worker) threads_.emplace_back([this, worker] { serve(worker); });
    } catch (...) {
        shut_down();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    if (static_cast<int>(::getpid()) != process_) {
        for (std::thread& thread : threads_) thread.detach();  // they do not exist in this process
        return;
    }
    shut_down();
}

void ThreadPool::pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void ThreadPool::shut_down() {
    stop_.store(true);
    wake_.fetch_add(1);
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::take_indices(int worker) {
    const ThreadPool* outer = inside_pool;
    inside_pool = this;
    for (;;) {
        const std::int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
        if (index >= count_) break;
        try {
            job_.invoke(job_.callable, index, worker);
        } catch (...) {
            if (!failed_.test_and_set()) error_ = std::current_exception();
            next_.store(count_, std::memory_order_relaxed);
        }
    }
    inside_pool = outer;
}

void ThreadPool::run(std::int64_t count, const Job& job) {
    if (count <= 0) return;
    if (inside_pool == this) fail("ThreadPool: a loop may not start another one on the same pool");
    std::lock_guard<std::mutex> lock(caller_);
    if (size_ > 1 && static_cast<int>(::getpid()) != process_) {
        throw std::runtime_error("the thread pool was made before a fork and has no threads in this process; make a new back-end here");
    }
    job_ = job;
    count_ = count;
    error_ = nullptr;
    failed_.clear();
    next_.store(0, std::memory_order_relaxed);
    const bool shared = size_ > 1 && count > 1;
    if (shared) {
        // Closed and empty before, so that no thread can be changing it.
        state_.store((state_.load(std::memory_order_relaxed) & kEpochMask) + kEpoch + kOpen, std::memory_order_release);
        wake_.fetch_add(1);
        wake_.notify_all();
    }
    take_indices(0);
    if (shared) {
        state_.fetch_and(~kOpen, std::memory_order_acq_rel);
        const auto empty = [this] { return (state_.load(std::memory_order_acquire) & kInside) == 0; };
        while (!wait_awake(empty)) {
        }
    }
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::serve(int worker) {
    std::uint64_t seen = 0;
    for (;;) {
        const std::uint32_t ticket = wake_.load();
        const auto called = [&] {
            const std::uint64_t state = state_.load(std::memory_order_acquire);
            return ((state & kOpen) != 0 && (state & kEpochMask) != seen) || stop_.load(std::memory_order_relaxed);
        };
        if (!wait_awake(called)) {
            wake_.wait(ticket);
            continue;
        }
        if (stop_.load()) return;
        std::uint64_t state = state_.load(std::memory_order_acquire);
        bool joined = false;
        while ((state & kOpen) != 0 && !joined) {
            joined = state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire);
        }
        if (!joined) continue;
        seen = state & kEpochMask;
        take_indices(worker);
        state_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace surogate
