// Times the linear kernels of one decode step (no attention between them) as one CUDA graph, after
// checking them.
//
// Build: nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I../csrc chain.cu \
//     ../csrc/linear*.cu -o chain
// Usage: chain [plain | fp8 | int8 | nvfp4 | model name | rows ...]   prints, per format, model
// shape and number of rows, ms per step and TB/s of weights. With NVFP4 layers the head is FP8.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/activations.cuh"
#include "linear.h"

namespace {

using flashrt::LinearArgs;
using flashrt::WeightFormat;
using T = __nv_bfloat16;

constexpr int kTileBytes = 2304;
constexpr int kCodeBytes = 2048;

#define CHECK(call)                                                      \
  do {                                                                   \
    const cudaError_t error_ = (call);                                   \
    if (error_ != cudaSuccess) {                                         \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   cudaGetErrorString(error_));                          \
      std::exit(1);                                                      \
    }                                                                    \
  } while (0)

struct Model {
  const char* name;
  int layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
};
constexpr Model kModels[] = {
    {"llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256},
    {"qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936},
    {"qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936},
};

__global__ void fill(T* data, size_t count, float scale, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
    data[i] = __float2bfloat16((static_cast<float>(h) * 2.3283064e-10f - 0.5f) * scale);
  }
}

T* allocate(size_t count, float scale, uint32_t seed) {
  T* data = nullptr;
  CHECK(cudaMalloc(&data, count * sizeof(T)));
  fill<<<1024, 256>>>(data, count, scale, seed);
  CHECK(cudaGetLastError());
  return data;
}

// A matrix of any format: random values of moderate size, and scales to go with them.
struct Weight {
  void* data;
  float* scale;  // null for plain weights
  WeightFormat format;
  int n, k;

  size_t bytes() const {
    const size_t count = size_t(n) * k;
    if (format == WeightFormat::kPlain) return count * 2;
    if (format == WeightFormat::kNVFP4)
      return size_t((n + 15) / 16) * ((k + 255) / 256) * kTileBytes;
    return count;
  }
};

__global__ void fill_packed(uint8_t* data, size_t bytes, WeightFormat format, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < bytes;
       i += size_t(gridDim.x) * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    uint8_t byte = static_cast<uint8_t>(h >> 8);
    if (format == WeightFormat::kFP8 && byte % 128 == 127) byte -= 1;  // NaN
    if (format == WeightFormat::kNVFP4 && i % kTileBytes >= kCodeBytes) byte = 20 * 8 + byte % 16;
    data[i] = byte;
  }
}

__global__ void fill_scale(float* scale, int n, float value) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) scale[i] = value * (1.0f + 0.001f * (i % 7));
}

Weight make_weight(WeightFormat format, int n, int k, float width, uint32_t seed) {
  Weight weight{nullptr, nullptr, format, n, k};
  if (format == WeightFormat::kPlain) {
    weight.data = allocate(size_t(n) * k, width, seed);
    return weight;
  }
  CHECK(cudaMalloc(&weight.data, weight.bytes()));
  fill_packed<<<1024, 256>>>(static_cast<uint8_t*>(weight.data), weight.bytes(), format, seed);
  CHECK(cudaMalloc(&weight.scale, n * sizeof(float)));
  const float size = format == WeightFormat::kFP8    ? 100.0f
                     : format == WeightFormat::kINT8 ? 74.0f
                                                     : 1.0f;
  fill_scale<<<(n + 255) / 256, 256>>>(weight.scale, n, 0.29f * width / size);
  CHECK(cudaGetLastError());
  return weight;
}

// Element (row, k) of a weight, without its row's scale.
__device__ float element(const void* data, WeightFormat format, int64_t stride, int row, int k,
                         int columns) {
  switch (format) {
    case WeightFormat::kPlain:
      return __bfloat162float(static_cast<const T*>(data)[row * stride + k]);
    case WeightFormat::kINT8:
      return static_cast<const int8_t*>(data)[row * stride + k];
    case WeightFormat::kFP8: {
      const int bits = static_cast<const uint8_t*>(data)[row * stride + k];
      const int exponent = bits >> 3 & 15;
      const float magnitude =
          exponent == 0 ? ldexpf(bits & 7, -9) : ldexpf(8 + (bits & 7), exponent - 10);
      return bits & 128 ? -magnitude : magnitude;
    }
    default: {
      const int turns = (columns + 255) / 256;
      const uint8_t* tile =
          static_cast<const uint8_t*>(data) + (size_t(row / 16) * turns + k / 256) * kTileBytes;
      const int segment = k % 256 / 128, half = row % 16 / 8, t = k % 128 / 32,
                lane = row % 8 * 4 + t;
      const uint32_t word = reinterpret_cast<const uint32_t*>(
          tile)[((segment * 2 + half) * 32 + lane) * 4 + k % 32 / 8];
      const uint32_t bits = k % 2 == 0 ? word & 0xffff : word >> 16;
      const int place[4][4] = {{15, 11, 10, 9}, {12, 8, 7, 6}, {14, 5, 4, 3}, {13, 2, 1, 0}};
      const int* p = place[k % 8 / 2];
      const int exponent = (bits >> p[1] & 1) * 2 + (bits >> p[2] & 1);
      const float mantissa = 0.5f * (bits >> p[3] & 1);
      const float magnitude = exponent == 0 ? mantissa : ldexpf(1.0f + mantissa, exponent - 1);
      const int scale = tile[kCodeBytes + lane * 8 + half * 4 + segment * 2 + k % 32 / 16];
      const float factor = ldexpf(1.0f + (scale & 7) / 8.0f, (scale >> 3) - 22);
      return (bits >> p[0] & 1 ? -magnitude : magnitude) * factor;
    }
  }
}

// One thread an output, plain loops: what the kernels must equal up to the order of sums.
__global__ void reference(LinearArgs a, float* out) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  const int m = blockIdx.y;
  const int outputs = a.gated ? a.n[0] : a.n[0] + a.n[1] + a.n[2];
  if (n >= outputs) return;
  const T* x = static_cast<const T*>(a.x) + m * a.x_stride;
  float scale = 1.0f;
  if (a.norm_kind != 0) {
    float sum = 0.0f;
    for (int k = 0; k < a.k; ++k) sum += __bfloat162float(x[k]) * __bfloat162float(x[k]);
    scale = rsqrtf(sum / a.k + a.norm_eps);
  }
  float y[2] = {0.0f, 0.0f};
  for (int part = 0; part < (a.gated ? 2 : 1); ++part) {
    int row = a.gated ? n + part * a.n[0] : n;
    int index = 0;
    while (row >= a.n[index]) row -= a.n[index++];
    for (int k = 0; k < a.k; ++k) {
      float v = __bfloat162float(x[k]);
      if (a.norm_kind != 0) {
        v = __bfloat162float(__float2bfloat16(
            v * scale * __bfloat162float(static_cast<const T*>(a.norm_weight)[k])));
      }
      y[part] += v * element(a.weight[index], a.format, a.weight_stride[index], row, k, a.k);
    }
    if (a.weight_scale[index] != nullptr) y[part] *= a.weight_scale[index][row];
  }
  float result = a.gated ? y[0] / (1.0f + expf(-y[0])) * y[1] : y[0];
  if (a.residual != nullptr)
    result += __bfloat162float(static_cast<const T*>(a.residual)[m * a.residual_stride + n]);
  out[static_cast<size_t>(m) * outputs + n] = result;
}

struct Layer {
  Weight q, k, v, o, gate, up, down;
  T *norm1, *norm2;
};

struct Buffers {
  T *hidden[2], *qkv, *attention, *gated;
  float* logits;
};

struct Step {
  Model model;
  std::vector<Layer> layers;
  Weight head;
  T* norm;
  Buffers buffers;

  Step(const Model& m, WeightFormat format) : model(m) {
    const size_t d = m.hidden, q = size_t(m.heads) * m.head_dim,
                 kv = size_t(m.kv_heads) * m.head_dim, f = m.intermediate;
    const float wd = 3.4f / std::sqrt(float(d)), wq = 3.4f / std::sqrt(float(q)),
                wf = 3.4f / std::sqrt(float(f));
    for (int i = 0; i < m.layers; ++i) {
      const uint32_t s = 100 * i;
      const auto make = [&](int n, int k, float width, int number) {
        return make_weight(format, n, k, width, s + number);
      };
      layers.push_back({make(q, d, wd, 1), make(kv, d, wd, 2), make(kv, d, wd, 3),
                        make(d, q, wq, 4), make(f, d, wd, 5), make(f, d, wd, 6), make(d, f, wf, 7),
                        allocate(d, 2.0f, s + 8), allocate(d, 2.0f, s + 9)});
    }
    head = make_weight(format == WeightFormat::kNVFP4 ? WeightFormat::kFP8 : format, m.vocab, d, wd,
                       7);
    norm = allocate(d, 2.0f, 8);
    buffers = {{allocate(8 * d, 2.0f, 9), allocate(8 * d, 2.0f, 10)},
               allocate(8 * (q + 2 * kv), 2.0f, 11),
               allocate(8 * q, 2.0f, 12),
               allocate(8 * f, 2.0f, 13),
               nullptr};
    CHECK(cudaMalloc(&buffers.logits, size_t(8) * m.vocab * sizeof(float)));
  }

  void release() const {
    for (const Layer& l : layers) {
      for (const Weight& w : {l.q, l.k, l.v, l.o, l.gate, l.up, l.down}) {
        CHECK(cudaFree(w.data));
        CHECK(cudaFree(w.scale));
      }
      CHECK(cudaFree(l.norm1));
      CHECK(cudaFree(l.norm2));
    }
    CHECK(cudaFree(head.data));
    CHECK(cudaFree(head.scale));
    for (T* buffer : {norm, buffers.hidden[0], buffers.hidden[1], buffers.qkv, buffers.attention,
                      buffers.gated})
      CHECK(cudaFree(buffer));
    CHECK(cudaFree(buffers.logits));
  }

  LinearArgs args(int m, const T* x, int k, std::vector<Weight> weights, void* out,
                  int out_n) const {
    LinearArgs a{};
    a.x = x;
    a.x_stride = k;
    a.num_weights = static_cast<int>(weights.size());
    for (int i = 0; i < a.num_weights; ++i) {
      a.weight[i] = weights[i].data;
      a.weight_scale[i] = weights[i].scale;
      a.weight_stride[i] = k;
      a.n[i] = weights[i].n;
    }
    a.format = weights[0].format;
    a.weight_col_stride = 1;
    a.scale = 1.0f;
    a.activation = flashrt::Activation::kIdentity;
    a.out = out;
    a.out_stride = out_n;
    a.type = a.out_type = flashrt::ElementType::kBF16;
    a.m = m;
    a.k = k;
    a.weights_static = true;
    return a;
  }

  std::vector<LinearArgs> launches(int m) const {
    const int d = model.hidden, q = model.heads * model.head_dim,
              kv = model.kv_heads * model.head_dim, f = model.intermediate;
    std::vector<LinearArgs> list;
    for (const Layer& l : layers) {
      LinearArgs a = args(m, buffers.hidden[0], d, {l.q, l.k, l.v}, buffers.qkv, q + 2 * kv);
      a.norm_weight = l.norm1, a.norm_eps = 1e-6f, a.norm_kind = 1;
      list.push_back(a);
      a = args(m, buffers.attention, q, {l.o}, buffers.hidden[1], d);
      a.residual = buffers.hidden[0], a.residual_stride = d;
      list.push_back(a);
      a = args(m, buffers.hidden[1], d, {l.gate, l.up}, buffers.gated, f);
      a.norm_weight = l.norm2, a.norm_eps = 1e-6f, a.norm_kind = 1;
      a.gated = true, a.activation = flashrt::Activation::kSilu;
      list.push_back(a);
      a = args(m, buffers.gated, f, {l.down}, buffers.hidden[0], d);
      a.residual = buffers.hidden[1], a.residual_stride = d;
      list.push_back(a);
    }
    LinearArgs a = args(m, buffers.hidden[0], d, {head}, buffers.logits, model.vocab);
    a.norm_weight = norm, a.norm_eps = 1e-6f, a.norm_kind = 1;
    a.out_type = flashrt::ElementType::kFP32;
    list.push_back(a);
    return list;
  }
};

std::vector<float> read(const LinearArgs& a) {
  const int outputs = a.gated ? a.n[0] : a.n[0] + a.n[1] + a.n[2];
  const size_t count = size_t(a.m) * outputs;
  std::vector<float> values(count);
  if (a.out_type == flashrt::ElementType::kFP32) {
    CHECK(cudaMemcpy(values.data(), a.out, count * 4, cudaMemcpyDeviceToHost));
    return values;
  }
  std::vector<T> raw(count);
  CHECK(cudaMemcpy(raw.data(), a.out, count * 2, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < count; ++i) values[i] = __bfloat162float(raw[i]);
  return values;
}

// Compare the four kernels of layer 0 and the head with the reference, and every row with its M = 1
// bits.
bool check(const Step& step) {
  bool good = true;
  std::vector<LinearArgs> launches = step.launches(8);
  const size_t last = launches.size() - 1;
  for (size_t index : {size_t(0), size_t(1), size_t(2), size_t(3), last}) {
    LinearArgs full = launches[index];
    const int outputs = full.gated ? full.n[0] : full.n[0] + full.n[1] + full.n[2];
    void* out = full.out;
    void* scratch = nullptr;
    float* expected = nullptr;
    CHECK(cudaMalloc(&scratch, size_t(8) * outputs * 4));
    CHECK(cudaMalloc(&expected, size_t(8) * outputs * 4));
    full.out = scratch;
    reference<<<dim3((outputs + 127) / 128, 8), 128>>>(full, expected);
    std::vector<float> want(size_t(8) * outputs);
    CHECK(cudaMemcpy(want.data(), expected, want.size() * 4, cudaMemcpyDeviceToHost));
    std::vector<float> single;
    for (int m = 0; m < 8; ++m) {
      LinearArgs a = full;
      a.m = 1;
      a.x = static_cast<const T*>(full.x) + m * full.x_stride;
      if (full.residual != nullptr)
        a.residual = static_cast<const T*>(full.residual) + m * full.residual_stride;
      CHECK(cudaMemset(scratch, 0xff, size_t(8) * outputs * 4));
      CHECK(flashrt::launch_linear(a, 0));
      const std::vector<float> row = read(a);
      single.insert(single.end(), row.begin(), row.end());
    }
    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      error += (single[i] - want[i]) * double(single[i] - want[i]);
      norm += want[i] * double(want[i]);
    }
    const double relative = std::sqrt(error / norm);
    int different = 0;
    for (int m = 2; m <= 8; ++m) {
      LinearArgs a = full;
      a.m = m;
      CHECK(cudaMemset(scratch, 0xff, size_t(8) * outputs * 4));
      CHECK(flashrt::launch_linear(a, 0));
      const std::vector<float> rows = read(a);
      for (size_t i = 0; i < rows.size(); ++i) different += !(rows[i] == single[i]);
    }
    good = good && relative < 5e-3 && different == 0;
    std::printf("  %s kernel %zu: relative error %.2e, values that differ from M = 1: %d\n",
                step.model.name, index, relative, different);
    full.out = out;
    CHECK(cudaFree(scratch));
    CHECK(cudaFree(expected));
  }
  return good;
}

// Kernels of a layer, and all of them with the head.
constexpr const char* kKinds[] = {"qkv", "o", "gate_up", "down", "head", "step"};
constexpr int kHead = 4, kWholeStep = 5;

void measure(const Step& step, int m, bool weights_static, int kind = kWholeStep) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const std::vector<LinearArgs> launches = step.launches(m);
  int count = 0;
  double bytes = 0.0;
  for (size_t i = 0; i < launches.size(); ++i) {
    const int own = i + 1 == launches.size() ? kHead : i % 4;
    if (kind != kWholeStep && kind != own) continue;
    LinearArgs a = launches[i];
    a.weights_static = weights_static;
    CHECK(flashrt::launch_linear(a, stream));
    ++count;
    for (int j = 0; j < a.num_weights; ++j)
      bytes += Weight{nullptr, nullptr, a.format, a.n[j], a.k}.bytes();
  }
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 5; ++i) CHECK(cudaGraphLaunch(exec, stream));
  std::vector<float> times;
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int i = 0; i < 30; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    for (int j = 0; j < 4; ++j) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms = 0.0f;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms / 4);
  }
  std::sort(times.begin(), times.end());
  const float median = times[times.size() / 2];
  std::printf("%-14s M=%d weights_static=%d %-8s %.4f ms  %6.2f us each  %.3f TB/s\n",
              step.model.name, m, weights_static, kKinds[kind], median, 1e3 * median / count,
              bytes / (median * 1e9));
  std::fflush(stdout);
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  const char* names[] = {"plain", "fp8", "int8", "nvfp4"};
  std::vector<int> rows;
  std::vector<int> formats;
  std::vector<std::string> models;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto name = std::find(std::begin(names), std::end(names), word);
    if (name != std::end(names)) {
      formats.push_back(name - std::begin(names));
    } else if (std::atoi(argv[i]) > 0) {
      rows.push_back(std::atoi(argv[i]));
    } else {
      models.push_back(word);
    }
  }
  if (rows.empty()) rows = {1, 2, 4, 8};
  if (formats.empty()) formats = {0};
  bool good = true;
  for (int format : formats) {
    for (const Model& model : kModels) {
      if (!models.empty() && std::find(models.begin(), models.end(), model.name) == models.end())
        continue;
      std::printf("%s\n", names[format]);
      const Step step(model, static_cast<WeightFormat>(format));
      CHECK(cudaDeviceSynchronize());
      good = check(step) && good;
      for (int m : rows) {
        measure(step, m, true);
        for (int kind = 0; kind <= kHead; ++kind) measure(step, m, true, kind);
      }
      measure(step, 1, false);
      step.release();
    }
  }
  std::printf(good ? "all checks passed\n" : "CHECK FAILED\n");
  return good ? 0 : 1;
}
