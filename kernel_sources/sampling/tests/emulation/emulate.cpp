#include "emulate.h"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

namespace emulate {

int thread;
unsigned block;

namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 1 << 16;

// Completes when all that are expected have arrived; then the next generation begins.
struct Barrier {
  int expected = 0;
  int arrived = 0;
  long generation = 0;
  uint32_t gathered = 0;
  uint32_t result = 0;

  void complete_if_due() {
    if (arrived == 0 || arrived < expected) return;
    result = gathered;
    arrived = 0;
    gathered = 0;
    ++generation;
  }
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  bool done = false;
};

std::vector<Fiber> fibers;
ucontext_t scheduler;
Barrier of_block;
std::vector<Barrier> of_warps;
const std::function<void()>* body;

void yield() { swapcontext(&fibers[thread].context, &scheduler); }

uint32_t meet(Barrier& barrier, uint32_t value) {
  const long generation = barrier.generation;
  barrier.gathered = max(barrier.gathered, value);
  ++barrier.arrived;
  barrier.complete_if_due();
  while (barrier.generation == generation) yield();
  return barrier.result;
}

void enter() {
  (*body)();
  fibers[thread].done = true;
  --of_block.expected;  // a thread that has returned counts at every barrier of its block
  of_block.complete_if_due();
  yield();
}

void start(Fiber& fiber) {
  fiber.done = false;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.context, enter, 0);
}

void run_block(int threads) {
  for (Fiber& fiber : fibers) start(fiber);
  of_block.expected = threads;
  of_warps.assign(threads / kWarp, Barrier{kWarp});
  long generations = 0;
  for (int left = threads, turns = 0; left > 0; ++turns) {
    for (int i = 0; i < threads; ++i) {
      thread = block % 2 == 0 ? i : threads - 1 - i;
      if (fibers[thread].done) continue;
      swapcontext(&scheduler, &fibers[thread].context);
      left -= fibers[thread].done;
    }
    if (turns > 1'000'000) {
      std::fprintf(stderr, "block %u: threads wait for each other\n", block);
      std::abort();
    }
  }
}

}  // namespace

void barrier() { meet(of_block, 0); }
bool any(bool value) { return meet(of_block, value) != 0; }
uint32_t warp_maximum(uint32_t value) { return meet(of_warps[thread / kWarp], value); }

void run(unsigned blocks, int threads, const std::function<void()>& kernel) {
  static std::mt19937 random(1);
  if (static_cast<int>(fibers.size()) != threads) fibers = std::vector<Fiber>(threads);
  body = &kernel;
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (unsigned next : order) {
    block = next;
    run_block(threads);
  }
}

}  // namespace emulate
