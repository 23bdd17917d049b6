// Checks and times attend without torch. Build and run from kernel_sources/attention:
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Icsrc -o /tmp/attend_bench \
//       benchmarks/attend_bench.cu csrc/attend_bf16.cu csrc/attend_bf16_fp8.cu &&
//   /tmp/attend_bench [check|step|long|short]...
// Times are of CUDA graphs over rotating caches, so that every call reads its cache from memory.
// `short`: alone is a chain of attend calls; after a producer is what a call adds to a chain of
// small kernels that write q, k and v. `step`: what a call adds between two kernels that read the
// weights of the projections around it, as they do in a decode step, in every form a launch may
// take; `long`: calls that read many slots, alone, in every form. Without an argument all of it
// runs. A failed check makes the exit status 1.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "attend.h"
#include "attend_cache.cuh"
#include "common/launch.h"
#include "common/pdl.cuh"
#include "ptx.cuh"

using flashrt::AttendParams;
using bf16 = __nv_bfloat16;

#define CHECK(call)                                                               \
  do {                                                                            \
    cudaError_t error_ = (call);                                                  \
    if (error_ != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
      std::exit(2);                                                               \
    }                                                                             \
  } while (0)

struct Config {
  const char* name;
  int batch, tokens, heads, kv_heads, dim, slots, length, window;
  bool norm, interleaved;
  float soft_cap;
  bool fp8 = false;
};
constexpr float kFp8Scale = 0.01f;

__device__ void store(bf16* to, float value) { *to = __float2bfloat16(value); }
__device__ void store(flashrt::Fp8* to, float value) {
  *to = flashrt::scaled_to_fp8(value, kFp8Scale);
}

template <typename T>
__global__ void fill(T* data, int64_t count, uint32_t seed, float spread, float centre) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    x ^= x >> 16;
    store(data + i, centre + spread * (static_cast<float>(x) * 4.6566129e-10f - 1.0f));
  }
}

// A kernel that writes q, k and v, as the projection before attend does.
__global__ void produce(const uint4* from, uint4* to, int count) {
  flashrt::launch_dependents();
  flashrt::wait_for_inputs();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from[i];
}

template <typename T = bf16>
T* device_rows(int64_t count, uint32_t seed, float spread = 1.0f, float centre = 0.0f) {
  T* data = nullptr;
  CHECK(cudaMalloc(&data, count * sizeof(T)));
  fill<<<1024, 256>>>(data, count, seed, spread, centre);
  CHECK(cudaGetLastError());
  return data;
}

// One call's tensors; q, k and v lie one after the other in `qkv`, as a fused projection leaves
// them.
struct Call {
  Config config;
  AttendParams params{};
  bf16* qkv;
  bf16* source;  // the same values, for produce
  int64_t cache_elements;
  std::vector<float> cos, sin;

  explicit Call(const Config& c) : config(c) {
    const int width = (c.heads + 2 * c.kv_heads) * c.dim;
    const int64_t tokens = static_cast<int64_t>(c.batch) * c.tokens;
    qkv = device_rows(tokens * width, 1);
    source = device_rows(tokens * width, 1);
    cache_elements = static_cast<int64_t>(c.batch) * c.kv_heads * c.slots * c.dim;
    AttendParams& p = params;
    p.q = qkv;
    p.k = qkv + c.heads * c.dim;
    p.v = qkv + (c.heads + c.kv_heads) * c.dim;
    for (auto* s : {&p.q_strides, &p.k_strides, &p.v_strides}) {
      (*s)[0] = static_cast<int64_t>(c.tokens) * width;
      (*s)[1] = width;
      (*s)[2] = c.dim;
    }
    for (auto* s : {&p.k_cache_strides, &p.v_cache_strides}) {
      (*s)[0] = static_cast<int64_t>(c.kv_heads) * c.slots * c.dim;
      (*s)[1] = static_cast<int64_t>(c.slots) * c.dim;
      (*s)[2] = c.dim;
    }
    if (c.fp8) {
      float* scale = nullptr;
      CHECK(cudaMalloc(&scale, sizeof(float)));
      CHECK(cudaMemcpy(scale, &kFp8Scale, sizeof(float), cudaMemcpyHostToDevice));
      p.k_scale = p.v_scale = scale;
    }
    std::vector<int> lengths(c.batch, c.length);
    int* device_lengths = nullptr;
    CHECK(cudaMalloc(&device_lengths, c.batch * sizeof(int)));
    CHECK(
        cudaMemcpy(device_lengths, lengths.data(), c.batch * sizeof(int), cudaMemcpyHostToDevice));
    p.lengths = device_lengths;
    make_tables();
    if (c.norm) {
      p.q_weight = device_rows(c.dim, 2, 0.3f, 1.0f);
      p.k_weight = device_rows(c.dim, 3, 0.3f, 1.0f);
    }
    const int64_t bytes =
        flashrt::attend_workspace_bytes(c.batch, c.tokens, c.heads, c.dim, c.slots);
    CHECK(cudaMalloc(&p.workspace, bytes));
    CHECK(cudaMemset(p.workspace, 0, bytes));
    CHECK(cudaMalloc(&p.out, tokens * c.heads * c.dim * sizeof(bf16)));
    p.batch = c.batch;
    p.tokens = c.tokens;
    p.heads = c.heads;
    p.kv_heads = c.kv_heads;
    p.slots = c.slots;
    p.dim = c.dim;
    p.window = c.window;
    p.scaling = 1.0f / std::sqrt(static_cast<float>(c.dim));
    p.soft_cap = c.soft_cap;
    p.history_static = true;
    p.rows = {1e-6f, c.dim, c.interleaved, false, false, true};
  }

  int64_t cache_bytes() const { return cache_elements * (config.fp8 ? 1 : 2); }
  // Room for `count` caches, filled.
  char* caches(int64_t count, uint32_t seed) const {
    return config.fp8
               ? reinterpret_cast<char*>(device_rows<flashrt::Fp8>(count * cache_elements, seed))
               : reinterpret_cast<char*>(device_rows(count * cache_elements, seed));
  }
  std::vector<float> cache_to_host(const void* cache) const;
  void attend(cudaStream_t stream) const {
    CHECK((config.fp8 ? flashrt::attend_bf16_fp8 : flashrt::attend_bf16)(params, stream));
  }

  void make_tables() {
    const int dim = config.dim;
    cos.resize(static_cast<size_t>(config.slots) * dim);
    sin.resize(cos.size());
    for (int slot = 0; slot < config.slots; ++slot) {
      for (int i = 0; i < dim; ++i) {
        const int frequency = config.interleaved ? i / 2 : i % (dim / 2);
        const double angle = slot * std::pow(10000.0, -2.0 * frequency / dim);
        cos[slot * dim + i] = static_cast<float>(std::cos(angle));
        sin[slot * dim + i] = static_cast<float>(std::sin(angle));
      }
    }
    for (auto [host, target] : {std::pair{&cos, &params.cos}, std::pair{&sin, &params.sin}}) {
      void* table = nullptr;
      CHECK(cudaMalloc(&table, host->size() * sizeof(float)));
      CHECK(cudaMemcpy(table, host->data(), host->size() * sizeof(float), cudaMemcpyHostToDevice));
      *target = table;
    }
    params.table_rows = config.slots;
    params.table_strides[0] = dim;
  }
};

std::vector<float> to_host(const void* data, int64_t count) {
  std::vector<bf16> raw(count);
  CHECK(cudaMemcpy(raw.data(), data, count * sizeof(bf16), cudaMemcpyDeviceToHost));
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = __bfloat162float(raw[i]);
  return values;
}

std::vector<float> Call::cache_to_host(const void* cache) const {
  if (!config.fp8) return to_host(cache, cache_elements);
  std::vector<flashrt::Fp8> raw(cache_elements);
  CHECK(cudaMemcpy(raw.data(), cache, cache_elements, cudaMemcpyDeviceToHost));
  std::vector<float> values(cache_elements);
  for (int64_t i = 0; i < cache_elements; ++i) {
    const __half_raw half = __nv_cvt_fp8_to_halfraw(raw[i].bits, __NV_E4M3);
    values[i] = kFp8Scale * __half2float(__half(half));
  }
  return values;
}

double rounded(double value) {
  return __bfloat162float(__float2bfloat16(static_cast<float>(value)));
}

std::vector<double> reference_row(const Call& call, const float* x, const float* weight,
                                  int position) {
  const int dim = call.config.dim;
  std::vector<double> y(x, x + dim), z(dim);
  if (weight != nullptr) {
    double sum = 0;
    for (double value : y) sum += value * value;
    for (int i = 0; i < dim; ++i) y[i] = rounded(y[i] / std::sqrt(sum / dim + 1e-6) * weight[i]);
  }
  const float* cos = &call.cos[static_cast<size_t>(position) * dim];
  const float* sin = &call.sin[static_cast<size_t>(position) * dim];
  for (int i = 0; i < dim; ++i) {
    const bool first = call.config.interleaved ? i % 2 == 0 : i < dim / 2;
    const int distance = call.config.interleaved ? 1 : dim / 2;
    z[i] = rounded(y[i] * cos[i] + (first ? -y[i + distance] : y[i - distance]) * sin[i]);
  }
  return z;
}

// Largest error of `out` against fp64, over all rows. Caches are those after the call.
double largest_error(const Call& call, const std::vector<float>& out,
                     const std::vector<float>& k_cache, const std::vector<float>& v_cache) {
  const Config& c = call.config;
  const int width = (c.heads + 2 * c.kv_heads) * c.dim, group = c.heads / c.kv_heads;
  const auto qkv = to_host(call.qkv, static_cast<int64_t>(c.batch) * c.tokens * width);
  std::vector<float> q_weight, k_weight;
  if (c.norm) q_weight = to_host(call.params.q_weight, c.dim);
  if (c.norm) k_weight = to_host(call.params.k_weight, c.dim);
  double worst = 0;
  for (int row = 0; row < c.batch * c.tokens * c.heads; ++row) {
    const int h = row % c.heads, t = row / c.heads % c.tokens, b = row / c.heads / c.tokens;
    const int g = h / group, position = c.length + t;
    const float* q = &qkv[static_cast<size_t>(b * c.tokens + t) * width + h * c.dim];
    const auto query = reference_row(call, q, c.norm ? q_weight.data() : nullptr, position);
    std::vector<double> scores, o(c.dim);
    std::vector<const float*> values;
    double maximum = -INFINITY, sum = 0;
    for (int slot = c.window ? std::max(0, position - c.window + 1) : 0; slot <= position; ++slot) {
      const int fresh = slot - c.length;
      const float* token = &qkv[static_cast<size_t>(b * c.tokens + std::max(fresh, 0)) * width];
      const size_t at = ((static_cast<size_t>(b) * c.kv_heads + g) * c.slots + slot) * c.dim;
      std::vector<double> key(&k_cache[at], &k_cache[at] + c.dim);
      if (fresh >= 0 && !c.fp8) {
        key = reference_row(call, token + (c.heads + g) * c.dim, c.norm ? k_weight.data() : nullptr,
                            slot);
      }
      double score = 0;
      for (int i = 0; i < c.dim; ++i) score += query[i] * key[i];
      score *= call.params.scaling;
      if (c.soft_cap > 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
      scores.push_back(score);
      values.push_back(fresh >= 0 && !c.fp8 ? token + (c.heads + c.kv_heads + g) * c.dim
                                            : &v_cache[at]);
      maximum = std::max(maximum, score);
    }
    for (size_t j = 0; j < scores.size(); ++j) {
      const double weight = std::exp(scores[j] - maximum);
      sum += weight;
      for (int i = 0; i < c.dim; ++i) o[i] += weight * values[j][i];
    }
    for (int i = 0; i < c.dim; ++i) {
      const double error = std::fabs(out[static_cast<size_t>(row) * c.dim + i] - o[i] / sum);
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
  }
  return worst;
}

// Against fp64, with clusters against without, and replayed.
bool check(const Config& config) {
  Call call(config);
  const int64_t outs =
      static_cast<int64_t>(config.batch) * config.tokens * config.heads * config.dim;
  char* k_cache = call.caches(1, 4);
  char* v_cache = call.caches(1, 5);
  call.params.k_cache = k_cache;
  call.params.v_cache = v_cache;
  constexpr int kRuns = 10;
  std::vector<float> results[kRuns];
  for (int run = 0; run < kRuns; ++run) {
    call.params.max_cluster = 8 >> run % 4;
    call.params.max_crowd = 1 + run / 4 % 2;
    call.params.max_ring = 2 + run % 3;
    call.params.history_static = run < kRuns / 2;
    CHECK(cudaMemset(call.params.out, 0xff, outs * sizeof(bf16)));
    call.attend(nullptr);
    CHECK(cudaDeviceSynchronize());
    results[run] = to_host(call.params.out, outs);
  }
  const double error =
      largest_error(call, results[0], call.cache_to_host(k_cache), call.cache_to_host(v_cache));
  bool same = true;
  for (int run = 1; run < kRuns; ++run) same = same && results[run] == results[0];
  const bool good = error < 0.01 && same;
  std::printf("%-34s error %.2e, forms %s: %s\n", config.name, error, same ? "equal" : "DIFFER",
              good ? "ok" : "FAILED");
  return good;
}

// Microseconds per repetition of `step(i)`, i in [0, count), as one graph.
double time_graph(int count, const std::function<void(int, cudaStream_t)>& step) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < count; ++i) step(i, stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int repeat = 0; repeat < 13; ++repeat) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    float milliseconds = 0;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    if (repeat >= 3) times.push_back(milliseconds);
  }
  std::sort(times.begin(), times.end());
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  return times[times.size() / 2] * 1e3 / count;
}

struct Form {
  int cluster, crowd, ring;
};

struct Timer {
  Call call;
  int64_t caches;
  int count;
  char *k_caches, *v_caches;

  explicit Timer(const Config& config) : call(config) {
    const int64_t budget = 40ll << 30;
    caches = std::max<int64_t>(2, std::min<int64_t>({256, static_cast<int64_t>(3e8 / bytes()) + 1,
                                                     budget / (2 * call.cache_bytes())}));
    count = static_cast<int>(std::max<int64_t>(caches, 36) / caches * caches);
    k_caches = call.caches(caches, 4);
    v_caches = call.caches(caches, 5);
  }
  ~Timer() {
    CHECK(cudaFree(k_caches));
    CHECK(cudaFree(v_caches));
  }
  double bytes() const {
    const Config& c = call.config;
    return 2.0 * c.batch * c.kv_heads * (c.length + 1.0) * c.dim * (c.fp8 ? 1 : 2);
  }
  void attend(int i, cudaStream_t stream) {
    AttendParams& params = call.params;
    params.k_cache = k_caches + i % caches * call.cache_bytes();
    params.v_cache = v_caches + i % caches * call.cache_bytes();
    call.attend(stream);
  }
  double alone() {
    return time_graph(count, [&](int i, cudaStream_t stream) { attend(i, stream); });
  }
  void use(const Form& form) {
    call.params.max_cluster = form.cluster;
    call.params.max_crowd = form.crowd;
    call.params.max_ring = form.ring;
  }
};

void time_config(const Config& config) {
  Timer timer(config);
  Call& call = timer.call;
  const int width =
      (config.heads + 2 * config.kv_heads) * config.dim * config.batch * config.tokens;
  const auto producer = [&](int, cudaStream_t stream) {
    CHECK(flashrt::launch(produce, dim3((width / 8 + 127) / 128), dim3(128), 0, stream,
                          reinterpret_cast<const uint4*>(call.source),
                          reinterpret_cast<uint4*>(call.qkv), width / 8));
  };
  const double producers = time_graph(timer.count, producer);
  std::printf("%-14s %5d %5d %d |", config.name, config.slots, config.length, config.tokens);
  for (const bool clusters : {true, false}) {
    for (const bool history_static : {true, false}) {
      call.params.max_cluster = clusters ? 0 : 1;
      call.params.history_static = history_static;
      const double alone = timer.alone();
      const double both = time_graph(timer.count, [&](int i, cudaStream_t stream) {
        producer(i, stream);
        timer.attend(i, stream);
      });
      std::printf(" %6.2f %6.2f", alone, both - producers);
      if (history_static) std::printf(" %5.2f", timer.bytes() / alone * 1e-6);
      std::printf(" |");
    }
  }
  std::printf("\n");
}

void time_long() {
  const std::vector<Form> forms = {{1, 1, 4}, {1, 1, 6}, {1, 2, 2}, {1, 2, 3}, {1, 2, 5}};
  std::printf("us and TB/s of a call alone, by cluster/crowd/ring\n%-18s %3s %6s %6s |", "", "B",
              "S", "live");
  for (const Form& form : forms) {
    std::printf("       %d/%d/%d |", form.cluster, form.crowd, form.ring);
  }
  std::printf("\n");
  const std::vector<Config> configs = {
      {"Qwen3-8B", 1, 1, 32, 8, 128, 32768, 2048, 0, true, false, 0},
      {"Qwen3-8B", 1, 1, 32, 8, 128, 32768, 8192, 0, true, false, 0},
      {"Qwen3-8B", 1, 1, 32, 8, 128, 32768, 20000, 0, true, false, 0},
      {"Qwen3-8B", 1, 1, 32, 8, 128, 32768, 32000, 0, true, false, 0},
      {"Qwen3-8B", 1, 1, 32, 8, 128, 131072, 128000, 0, true, false, 0},
      {"Qwen3-8B", 4, 1, 32, 8, 128, 8192, 8000, 0, true, false, 0},
      {"Llama-3.2-1B", 1, 1, 32, 8, 64, 131072, 32000, 0, false, false, 0},
      {"Llama-3.2-1B", 1, 1, 32, 8, 64, 131072, 128000, 0, false, false, 0},
  };
  for (const bool fp8 : {false, true}) {
    for (Config config : configs) {
      config.fp8 = fp8;
      Timer timer(config);
      std::printf("%-14s %s %3d %6d %6d |", config.name, fp8 ? "FP8" : "   ", config.batch,
                  config.slots, config.length);
      for (const Form& form : forms) {
        timer.use(form);
        const double alone = timer.alone();
        std::printf(" %6.2f %4.2f |", alone, timer.bytes() / alone * 1e-6);
      }
      std::printf("\n");
    }
  }
}

// A projection of decode: 16 rows of `k` bf16 weights a block, asked for before the inputs are
// there, then its inputs, then `to`. The sum keeps the loads.
constexpr int kWeightThreads = 256, kWeightStages = 4, kStageBytes = 16 * 1024;
__global__ void project(const uint4* weights, const uint4* inputs, int input_count,
                        const uint4* from, uint4* to, int count, int stages) {
  flashrt::launch_dependents();
  extern __shared__ __align__(16) unsigned char ring[];
  constexpr int kPieces = kStageBytes / 16;
  weights += static_cast<int64_t>(blockIdx.x) * stages * kPieces;
  const auto ask = [&](int stage) {
    for (int i = threadIdx.x; stage < stages && i < kPieces; i += kWeightThreads) {
      flashrt::copy_async(ring + stage % kWeightStages * kStageBytes + 16 * i,
                          weights + stage * kPieces + i, 16);
    }
    flashrt::commit_copies();
  };
  for (int stage = 0; stage < kWeightStages; ++stage) ask(stage);
  flashrt::wait_for_inputs();
  uint4* x = reinterpret_cast<uint4*>(ring + kWeightStages * kStageBytes);
  for (int i = threadIdx.x; i < input_count; i += kWeightThreads) x[i] = __ldcg(inputs + i);
  __syncthreads();
  uint32_t sum = 0;
  for (int stage = 0; stage < stages; ++stage) {
    flashrt::wait_copies(kWeightStages - 1);
    for (int i = threadIdx.x; i < kPieces; i += kWeightThreads) {
      const uint4 w = reinterpret_cast<uint4*>(ring + stage % kWeightStages * kStageBytes)[i];
      sum += w.x ^ w.y ^ w.z ^ w.w ^ x[i % input_count].x;
    }
    ask(stage + kWeightStages);
  }
  const int i = blockIdx.x * kWeightThreads + threadIdx.x;
  if (i < count) to[i] = from[i];
  if (sum == 0x12345678u) to[0].x = from[0].x;
}

// One layer's projections: [rows, k] weights for every layer of a chain.
struct Projection {
  int rows, k, inputs;  // 16-byte pieces of the inputs
  bf16* weights;

  Projection(int rows, int k, int batch, int layers) : rows(rows), k(k), inputs(batch * k / 8) {
    weights = device_rows(static_cast<int64_t>(layers) * rows * k, 6);
    CHECK(cudaFuncSetAttribute(project, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes()));
  }
  int bytes() const { return kWeightStages * kStageBytes + 16 * inputs; }
  void launch(int layer, const void* x, const void* from, void* to, int count,
              cudaStream_t stream) const {
    const auto* at =
        reinterpret_cast<const uint4*>(weights + static_cast<int64_t>(layer) * rows * k);
    CHECK(flashrt::launch(project, dim3(rows / 16), dim3(kWeightThreads), bytes(), stream, at,
                          static_cast<const uint4*>(x), inputs, static_cast<const uint4*>(from),
                          static_cast<uint4*>(to), count, 16 * k * 2 / kStageBytes));
  }
};

void time_step(const Config& config, const std::vector<Form>& forms) {
  Call call(config);
  constexpr int kLayers = 8;
  const int hidden = config.heads * config.dim;
  const int width = hidden + 2 * config.kv_heads * config.dim;
  const Projection before(width, hidden, config.batch, kLayers);
  const Projection after(hidden, hidden, config.batch, kLayers);
  char* k_caches = call.caches(kLayers, 4);
  char* v_caches = call.caches(kLayers, 5);
  const int count = width * config.batch / 8;
  const auto layer = [&](int i, cudaStream_t stream, bool with_attend) {
    before.launch(i % kLayers, call.params.out, call.source, call.qkv, count, stream);
    call.params.k_cache = k_caches + i % kLayers * call.cache_bytes();
    call.params.v_cache = v_caches + i % kLayers * call.cache_bytes();
    if (with_attend) call.attend(stream);
    after.launch(i % kLayers, call.params.out, call.source, call.source, 0, stream);
  };
  const double without =
      time_graph(36, [&](int i, cudaStream_t stream) { layer(i, stream, false); });
  std::printf("%-14s %3d %5d %6d | %6.2f |", config.name, config.batch, config.slots, config.length,
              without);
  for (const Form& form : forms) {
    call.params.max_cluster = form.cluster;
    call.params.max_crowd = form.crowd;
    call.params.max_ring = form.ring;
    const double with = time_graph(36, [&](int i, cudaStream_t stream) { layer(i, stream, true); });
    std::printf(" %6.2f", with - without);
  }
  std::printf("\n");
  for (void* data : {static_cast<void*>(k_caches), static_cast<void*>(v_caches),
                     static_cast<void*>(before.weights), static_cast<void*>(after.weights)}) {
    CHECK(cudaFree(data));
  }
}

void time_steps() {
  const std::vector<Form> forms = {{8, 1, 4}, {8, 1, 2}, {8, 2, 2}, {4, 1, 4}, {4, 1, 2},
                                   {4, 2, 2}, {2, 1, 2}, {2, 2, 2}, {1, 1, 4}, {1, 1, 2}};
  std::printf("us that a call adds to a layer, by cluster/crowd/ring\n%-14s %3s %5s %6s | %6s |",
              "", "B", "S", "live", "layer");
  for (const Form& form : forms) std::printf("  %d/%d/%d", form.cluster, form.crowd, form.ring);
  std::printf("\n");
  for (const int batch : {1, 2, 4, 8}) {
    for (const int live : {128, 300, 384, 1000}) {
      time_step({"Qwen3-8B", batch, 1, 32, 8, 128, 1024, live, 0, true, false, 0}, forms);
    }
  }
  for (const int batch : {1, 4}) {
    for (const int live : {128, 384, 1000}) {
      time_step({"Llama-3.2-1B", batch, 1, 32, 8, 64, 1024, live, 0, false, false, 0}, forms);
    }
  }
  time_step({"Qwen3-8B", 1, 1, 32, 8, 128, 2048, 1500, 0, true, false, 0}, forms);
  time_step({"Qwen3-8B FP8", 1, 1, 32, 8, 128, 1024, 300, 0, true, false, 0, true}, forms);
  time_step({"Qwen3-8B FP8", 4, 1, 32, 8, 128, 1024, 300, 0, true, false, 0, true}, forms);
}

bool check_all() {
  bool good = true;
  for (const Config& config : {
           Config{"Qwen3-8B", 1, 1, 32, 8, 128, 1024, 300, 0, true, false, 0},
           Config{"Llama-3.2-1B", 1, 1, 32, 8, 64, 1024, 127, 0, false, false, 0},
           Config{"empty cache", 1, 1, 32, 8, 128, 1024, 0, 0, true, false, 0},
           Config{"last slot", 1, 1, 32, 8, 128, 1024, 1023, 0, true, false, 0},
           Config{"many supers", 1, 1, 32, 8, 128, 16384, 9000, 0, true, false, 0},
           Config{"more supers than clusters", 1, 1, 32, 8, 64, 32768, 20000, 0, true, false, 0},
           Config{"4 tokens across an edge", 1, 4, 32, 8, 128, 2048, 1022, 0, true, false, 0},
           Config{"32 rows, many supers", 1, 8, 32, 8, 128, 16384, 9000, 0, true, false, 0},
           Config{"8 sequences", 8, 1, 16, 8, 64, 512, 200, 0, true, false, 0},
           Config{"4 sequences", 4, 1, 32, 8, 128, 1024, 1000, 0, true, false, 0},
           Config{"4 sequences of Llama", 4, 1, 32, 8, 64, 1024, 600, 0, true, false, 0},
           Config{"8 tokens, one key head", 1, 8, 8, 1, 128, 512, 121, 0, true, false, 0},
           Config{"FP8", 1, 1, 32, 8, 128, 1024, 300, 0, true, false, 0, true},
           Config{"FP8, 4 sequences", 4, 2, 32, 8, 64, 1024, 600, 0, false, false, 0, true},
           Config{"FP8, many supers", 1, 1, 32, 8, 128, 16384, 9000, 0, true, false, 0, true},
           Config{"FP8, dim 80", 1, 1, 32, 32, 80, 512, 400, 0, false, false, 0, true},
           Config{"FP8, dim 96", 1, 2, 32, 8, 96, 512, 400, 0, false, true, 0, true},
           Config{"FP8, dim 192", 1, 1, 16, 4, 192, 2048, 1500, 0, false, false, 0, true},
           Config{"FP8, dim 256", 1, 2, 8, 4, 256, 4096, 3000, 1000, false, true, 30, true},
           Config{"window, soft cap, interleaved", 1, 2, 8, 4, 256, 4096, 3000, 1000, false, true,
                  30},
           Config{"dim 80", 1, 1, 32, 32, 80, 512, 400, 0, false, false, 0},
           Config{"dim 96", 1, 2, 32, 8, 96, 512, 400, 0, false, true, 0},
           Config{"dim 192", 1, 1, 16, 4, 192, 2048, 1500, 0, false, false, 0},
           Config{"dim 256, one key head", 1, 1, 8, 1, 256, 1024, 700, 0, true, false, 0},
       }) {
    good = check(config) && good;
  }
  std::printf(good ? "all checks passed\n" : "CHECKS FAILED\n");
  return good;
}

void time_short() {
  std::printf(
      "us a call: alone, after a producer, TB/s alone\n"
      "                   S  live T | clusters, static     | wait first    | workspace, static    "
      "| "
      "wait first\n");
  for (const int live : {128, 512, 1000}) {
    time_config({"Qwen3-8B", 1, 1, 32, 8, 128, 1024, live, 0, true, false, 0});
    time_config({"Llama-3.2-1B", 1, 1, 32, 8, 64, 1024, live, 0, false, false, 0});
  }
  for (const int live : {512, 2048, 4096, 8192, 16384, 20000, 32000}) {
    time_config({"Qwen3-8B", 1, 1, 32, 8, 128, 32768, live, 0, true, false, 0});
  }
  for (const int live : {512, 16384}) {
    for (const int tokens : {4, 8}) {
      time_config({"Qwen3-8B", 1, tokens, 32, 8, 128, 32768, live, 0, true, false, 0});
    }
  }
  time_config({"Qwen3-8B", 1, 4, 32, 8, 128, 1024, 512, 0, true, false, 0});
  time_config({"Llama-2-7B", 1, 1, 32, 32, 128, 4096, 512, 0, false, false, 0});
  time_config({"Llama-2-7B", 1, 1, 32, 32, 128, 4096, 4000, 0, false, false, 0});
  time_config({"Gemma-3-4B", 1, 1, 8, 4, 256, 8192, 1000, 1024, true, false, 0});
  time_config({"Gemma-3-4B", 1, 1, 8, 4, 256, 8192, 8000, 0, true, false, 0});
  time_config({"8 sequences", 8, 1, 32, 8, 128, 1024, 512, 0, true, false, 0});
}

int main(int count, char** arguments) {
  const auto asked = [&](const char* part) {
    if (count == 1) return true;
    return std::any_of(arguments + 1, arguments + count,
                       [&](const char* argument) { return std::strcmp(argument, part) == 0; });
  };
  bool good = true;
  if (asked("check")) good = check_all();
  if (asked("step")) time_steps();
  if (asked("long")) time_long();
  if (asked("short")) time_short();
  return good ? 0 : 1;
}
