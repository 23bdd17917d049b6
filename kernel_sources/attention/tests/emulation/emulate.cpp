#include "emulate.h"

#include <memory>
#include <random>

// Save the callee-saved registers and the stack pointer, and go on where `to` was saved (x86-64).
extern "C" void switch_stack(void** save, void* to);
asm(R"(
.text
.globl switch_stack
switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulate {

Thread* current = nullptr;
dim3 grid;

namespace {

constexpr int kStackBytes = 64 << 10;
void* scheduler_stack = nullptr;
const std::function<void()>* body = nullptr;

void leave(Barrier& barrier) {
  --barrier.expected;
  if (barrier.expected > 0) barrier.complete_if_due();
}

// A thread that exits counts as arrived everywhere.
void run_thread() {
  (*body)();
  Thread& self = *current;
  self.done = true;
  leave(self.warp->barrier);
  leave(self.block->barrier);
  if (self.cluster != nullptr) {
    Barrier& barrier = self.cluster->barrier;
    if (self.cluster_arrived && self.cluster_generation == barrier.generation) --barrier.arrived;
    leave(barrier);
  }
  switch_stack(&self.stack_pointer, scheduler_stack);
  fail("a thread ran on after its end");
}

std::unique_ptr<Thread> make_thread(int index, Block* block, Cluster* cluster) {
  auto thread = std::make_unique<Thread>();
  thread->index = uint3{static_cast<unsigned>(index), 0, 0};
  thread->lane = index % 32;
  thread->warp = &block->warps[index / 32];
  thread->block = block;
  thread->cluster = cluster;
  thread->stack.resize(kStackBytes);
  const auto end = reinterpret_cast<uintptr_t>(thread->stack.data() + kStackBytes) & ~uintptr_t{15};
  void** top = reinterpret_cast<void**>(end - 8);
  *--top = reinterpret_cast<void*>(run_thread);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  thread->stack_pointer = top;
  return thread;
}

// Run every thread of a warp that can until its next barrier; returns how many ran.
int advance(std::unique_ptr<Thread>* warp, size_t* left) {
  int ran = 0;
  for (int lane = 0; lane < 32; ++lane) {
    Thread* thread = warp[lane].get();
    if (thread->done) continue;
    if (thread->waits_for && thread->waits_for->generation == thread->waits_until) continue;
    thread->waits_for = nullptr;
    current = thread;
    switch_stack(&scheduler_stack, thread->stack_pointer);
    ++ran;
    if (thread->done) --*left;
  }
  return ran;
}

void run_cluster(std::vector<std::unique_ptr<Thread>>& threads, std::mt19937& random) {
  std::vector<int> warps(threads.size() / 32);
  for (size_t i = 0; i < warps.size(); ++i) warps[i] = static_cast<int>(i);
  for (size_t left = threads.size(); left > 0;) {
    std::shuffle(warps.begin(), warps.end(), random);
    int ran = 0;
    for (const int warp : warps) {
      for (int steps = random() % 60 + 1; steps > 0; --steps) {
        const int now = advance(&threads[32 * warp], &left);
        ran += now;
        if (now == 0) break;
      }
    }
    if (ran == 0) fail("deadlock");
  }
}

}  // namespace

void yield() {
  Thread* self = current;
  switch_stack(&self->stack_pointer, scheduler_stack);
}

void wait(Barrier& barrier, long generation) {
  if (barrier.generation != generation) return;
  current->waits_for = &barrier;
  current->waits_until = generation;
  yield();
}

void run(dim3 blocks, int threads, int cluster_blocks, int shared_bytes,
         const std::function<void()>& kernel, unsigned seed) {
  std::mt19937 random(seed);
  grid = blocks;
  body = &kernel;
  for (unsigned z = 0; z < blocks.z; ++z) {
    for (unsigned y = 0; y < blocks.y; ++y) {
      for (unsigned x = 0; x < blocks.x; x += cluster_blocks) {
        Cluster cluster;
        cluster.blocks.resize(cluster_blocks);
        cluster.barrier.expected = cluster_blocks * threads;
        std::vector<std::unique_ptr<Thread>> all;
        for (int rank = 0; rank < cluster_blocks; ++rank) {
          Block& block = cluster.blocks[rank];
          block.index = uint3{x + rank, y, z};
          block.barrier.expected = threads;
          block.warps.resize(threads / 32);
          for (Warp& warp : block.warps) warp.barrier.expected = 32;
          block.shared.assign(shared_bytes, 0xff);
          block.statics.assign(256, 0xff);
          for (int i = 0; i < threads; ++i) {
            all.push_back(make_thread(i, &block, cluster_blocks > 1 ? &cluster : nullptr));
          }
        }
        run_cluster(all, random);
      }
    }
  }
}

}  // namespace emulate
