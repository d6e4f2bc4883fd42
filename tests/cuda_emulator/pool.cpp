// A persistent pool of OS threads: blocks of a launch and columns of a matrix product are spread over it.
#include "runtime.h"

#include <atomic>
#include <condition_variable>
#include <thread>

namespace emu {

namespace {

// Only one job runs at a time: run_parallel is called under the driver's lock.
class Pool {
  public:
    Pool() {
        const long wanted = setting("QUANTKIT_EMULATOR_THREADS", long(std::thread::hardware_concurrency()));
        threads = int(wanted < 1 ? 1 : wanted > 64 ? 64 : wanted);
        for (int i = 1; i < threads; ++i) std::thread([this] { serve(); }).detach();
    }

    void run(long count, const std::function<void(long)>& what) {
        if (count <= 1 || threads == 1) {
            for (long i = 0; i < count; ++i) what(i);
            return;
        }
        {
            std::lock_guard<std::mutex> hold(mutex);
            job = &what;
            total = count;
            next = 0;
            busy = threads - 1;
            ++generation;
        }
        begin.notify_all();
        take();
        std::unique_lock<std::mutex> hold(mutex);
        end.wait(hold, [this] { return busy == 0; });
    }

    int threads;

  private:
    void take() {
        for (long i; (i = next++) < total;) (*job)(i);
    }
    void serve() {
        ensure_signal_stack();
        for (long seen = 0;;) {
            std::unique_lock<std::mutex> hold(mutex);
            begin.wait(hold, [&] { return generation != seen; });
            seen = generation;
            hold.unlock();
            take();
            hold.lock();
            if (--busy == 0) end.notify_one();
        }
    }

    std::mutex mutex;
    std::condition_variable begin, end;
    const std::function<void(long)>* job = nullptr;
    std::atomic<long> next{0};
    long total = 0, generation = 0;
    int busy = 0;
};

// Never destroyed: its threads outlive static destructors.
Pool& pool() {
    static Pool* pool = new Pool;
    return *pool;
}

// Workers not in use. A worker is tied to an OS thread only while it runs a block.
class Workers {
  public:
    Worker* take() {
        std::lock_guard<std::mutex> hold(mutex);
        if (idle.empty()) return make_worker(++made);
        Worker* worker = idle.back();
        idle.pop_back();
        return worker;
    }
    void give(Worker* worker) {
        std::lock_guard<std::mutex> hold(mutex);
        idle.push_back(worker);
    }

  private:
    std::mutex mutex;
    std::vector<Worker*> idle;
    unsigned made = unsigned(setting("QUANTKIT_EMULATOR_SEED", 1)) * 64;
};

Workers& workers() {
    static Workers* workers = new Workers;
    return *workers;
}

}  // namespace

void run_parallel(long count, const std::function<void(long)>& job) { pool().run(count, job); }

void run_kernel(const Launch& launch) {
    const dim3 grid = launch.grid;
    const long blocks = long(grid.x) * grid.y * grid.z, threads = long(launch.block.x) * launch.block.y * launch.block.z;
    // Waking the pool costs more than a few thousand idle threads do.
    long piece = blocks / 64 > 1 ? blocks / 64 : 1;
    if (blocks * threads < 4096) piece = blocks;
    const long pieces = (blocks + piece - 1) / piece;
    std::atomic<bool> failed{false};
    run_parallel(pieces, [&](long job) {
        ensure_signal_stack();
        Worker* worker = workers().take();
        const long end = (job + 1) * piece < blocks ? (job + 1) * piece : blocks;
        for (long i = job * piece; i < end && !failed; ++i) {
            const uint3 index{unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / grid.x / grid.y)};
            if (!run_block(worker, launch, index)) failed = true;
        }
        workers().give(worker);
    });
}

}  // namespace emu
