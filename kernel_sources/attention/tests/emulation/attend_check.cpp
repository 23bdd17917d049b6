// attend_kernel, emulated, against fp64: outputs, cache, counters; with and without clusters and
// with different numbers of blocks, which must give the same bits.
#include "attend.cuh"
#include "emulate.h"

namespace flashrt {
namespace {

struct Case {
  const char* name;
  int batch, tokens, heads, kv_heads, slots;
  std::vector<int> lengths;
  int window;
  int norm;  // 0 none, 1 head, 2 all heads
  bool interleaved;
  float soft_cap;
  int rotary_dim;
};

uint32_t random_state = 1;
float random_value() {
  random_state = random_state * 1664525u + 1013904223u;
  return static_cast<float>(random_state >> 8) / 8388608.0f - 1.0f;
}

template <typename T>
double rounded(double value) {
  return to_float(from_float<T>(static_cast<float>(value)));
}

template <typename T>
std::vector<T> random_rows(size_t count, float spread = 1.0f, float centre = 0.0f) {
  std::vector<T> values(count);
  for (T& value : values) value = from_float<T>(centre + spread * random_value());
  return values;
}

float stored(__nv_bfloat16 value) { return to_float(value); }
float stored(__half value) { return to_float(value); }
float stored(Fp8 value) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(value.bits, __NV_E4M3)));
}
template <typename C>
C to_stored(float value) {
  if constexpr (kIsFp8<C>) {
    return scaled_to_fp8(value, 1.0f);
  } else {
    return from_float<C>(value);
  }
}

template <typename T, int D, typename C = T>
class Check {
 public:
  explicit Check(const Case& c) : c_(c), group_(c.heads / c.kv_heads) {
    const int tokens = c.batch * c.tokens;
    q_ = random_rows<T>(tokens * c.heads * D);
    k_ = random_rows<T>(tokens * c.kv_heads * D);
    v_ = random_rows<T>(tokens * c.kv_heads * D);
    k_before_ = random_cache(k_scale_, 0.003f);
    v_before_ = random_cache(v_scale_, 0.02f);
    q_weight_ = random_rows<T>(c.heads * D, 0.3f, 1.0f);
    k_weight_ = random_rows<T>(c.kv_heads * D, 0.3f, 1.0f);
    out_.resize(q_.size());
    make_tables();
    poison_dead_rows();
    fill_params();
  }

  bool passes() {
    bool good = true;
    std::vector<T> first;
    for (int run = 0; run < 6; ++run) {
      const bool clusters = run % 2 == 0;
      launch(clusters ? kMostClusterBlocks >> run / 2 : 1,
             run / 2 == 0   ? 1
             : run / 2 == 1 ? 1000
                            : 3,
             run);
      if (run == 0) first = out_;
      good = expect(std::memcmp(first.data(), out_.data(), out_.size() * sizeof(T)) == 0,
                    "bits differ") &&
             good;
      good = expect(cache_is_right(), "cache is wrong") && good;
      const int* counters = reinterpret_cast<const int*>(workspace_.data());
      good = expect(std::all_of(counters, counters + kCounters, [](int n) { return n == 0; }),
                    "counters are left") &&
             good;
    }
    const double error = largest_error();
    good = expect(error < 0.01, "error is large") && good;
    std::printf("%s: error %.1e, %s\n", c_.name, error, good ? "passed" : "FAILED");
    return good;
  }

 private:
  static bool expect(bool condition, const char* otherwise) {
    if (!condition) std::printf("  %s\n", otherwise);
    return condition;
  }

  size_t cache_at(int b, int g, int slot) const {
    return ((static_cast<size_t>(b) * c_.kv_heads + g) * c_.slots + slot) * D;
  }

  // Random rows, and scales per key head that are 1 without FP8.
  std::vector<C> random_cache(std::vector<float>& scales, float scale) {
    std::vector<C> cache;
    for (int g = 0; g < c_.kv_heads; ++g) scales.push_back(kIsFp8<C> ? scale * (1 + g) : 1.0f);
    for (int b = 0; b < c_.batch; ++b) {
      for (int g = 0; g < c_.kv_heads; ++g) {
        for (int i = 0; i < c_.slots * D; ++i) {
          cache.push_back(to_stored<C>(random_value() / scales[g]));
        }
      }
    }
    return cache;
  }

  void make_tables() {
    const int width = c_.rotary_dim;
    for (int slot = 0; slot < c_.slots; ++slot) {
      for (int i = 0; i < width; ++i) {
        const int frequency = c_.interleaved ? i / 2 : i % (width / 2);
        const double angle = slot * std::pow(100.0, -2.0 * frequency / width);
        cos_.push_back(static_cast<float>(std::cos(angle)));
        sin_.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }

  void poison_dead_rows() {
    for (int b = 0; b < c_.batch; ++b) {
      const int length = c_.lengths[b];
      const int oldest = c_.window ? std::max(0, length - c_.window + 1) : 0;
      for (int row = 0; row < c_.kv_heads * c_.slots; ++row) {
        const int slot = row % c_.slots;
        if (slot >= oldest && slot < length) continue;
        for (int i = 0; i < D; ++i) {
          const size_t at = cache_at(b, row / c_.slots, slot) + i;
          k_before_[at] = v_before_[at] = to_stored<C>(NAN);
        }
      }
    }
  }

  void fill_params() {
    AttendParams& p = params_;
    p.q = q_.data(), p.k = k_.data(), p.v = v_.data();
    p.lengths = c_.lengths.data();
    p.k_scale = k_scale_.data(), p.v_scale = v_scale_.data();
    p.k_scale_stride = p.v_scale_stride = 1;
    p.cos = cos_.data(), p.sin = sin_.data();
    p.q_weight = c_.norm ? q_weight_.data() : nullptr;
    p.k_weight = c_.norm ? k_weight_.data() : nullptr;
    const int64_t heads[3] = {int64_t{1} * c_.tokens * c_.heads * D, c_.heads * D, D};
    const int64_t keys[3] = {int64_t{1} * c_.tokens * c_.kv_heads * D, c_.kv_heads * D, D};
    const int64_t cache[3] = {int64_t{1} * c_.kv_heads * c_.slots * D, int64_t{1} * c_.slots * D,
                              D};
    std::copy(heads, heads + 3, p.q_strides);
    for (int64_t* strides : {p.k_strides, p.v_strides}) std::copy(keys, keys + 3, strides);
    for (int64_t* strides : {p.k_cache_strides, p.v_cache_strides}) {
      std::copy(cache, cache + 3, strides);
    }
    p.table_rows = c_.slots;
    p.table_strides[0] = c_.rotary_dim;
    p.batch = c_.batch, p.tokens = c_.tokens, p.heads = c_.heads, p.kv_heads = c_.kv_heads;
    p.slots = c_.slots, p.dim = D;
    p.window = c_.window ? c_.window : 2147483647;
    p.soft_cap = c_.soft_cap;
    p.scaling = static_cast<float>(scaling() * (c_.soft_cap == 0.0f ? 1.4426950408889634 : 1.0));
    const bool all = c_.norm == 2;
    p.rows = {1e-6f, c_.rotary_dim, c_.interleaved, false, all, true};
    const int rows = c_.tokens * group_;
    tiles_ = (rows + kMaxRows - 1) / kMaxRows;
    p.group = Divisor(group_), p.tiles = Divisor(tiles_), p.lanes = Divisor(c_.batch * tiles_);
    p.row_tiles = (std::min(rows, kMaxRows) + kTileRows - 1) / kTileRows;
    p.levels = kSuperLevel;
    p.partial_rows = c_.batch * c_.tokens * c_.heads;
    const int64_t sums = store_el_bytes(p.partial_rows, c_.slots);
    const int splits = (c_.slots + kSplit - 1) / kSplit;
    workspace_.assign(kCounterBytes + sums + int64_t{4} * splits * p.partial_rows * D, 0xff);
    std::memset(workspace_.data(), 0, kCounterBytes);
    p.workspace = workspace_.data();
    p.partial_el = reinterpret_cast<float*>(workspace_.data() + kCounterBytes);
    p.partial_o = reinterpret_cast<float*>(workspace_.data() + kCounterBytes + sums);
    p.q_inverse_count = 1.0f / static_cast<float>((all ? c_.heads : 1) * D);
    p.k_inverse_count = 1.0f / static_cast<float>((all ? c_.kv_heads : 1) * D);
    p.out = out_.data();
  }

  double scaling() const { return 1.0 / std::sqrt(static_cast<double>(D)); }

  // `unit`: blocks of a key head's only cluster, or 1: at most `share` blocks without clusters.
  void launch(int unit, int share, unsigned seed) {
    const bool clusters = unit > 1;
    const int splits = (c_.slots + kSplit - 1) / kSplit;
    const int blocks = clusters ? unit : std::min(share, splits);
    k_cache_ = k_before_, v_cache_ = v_before_;
    std::fill(out_.begin(), out_.end(), from_float<T>(NAN));
    params_.k_cache = k_cache_.data(), params_.v_cache = v_cache_.data();
    params_.use_clusters = clusters;
    params_.history_static = seed % 4 < 2;
    params_.blocks = Divisor(blocks);
    params_.ring_slots = 1 + seed % 6;
    const int gather_rows = clusters ? std::min(c_.tokens * group_, kMaxRows) : 0;
    params_.layout = SharedLayout<C, D>(params_.ring_slots, params_.levels, params_.row_tiles,
                                        c_.tokens, gather_rows);
    const int bytes = params_.layout.total;
    const int lanes = c_.batch * tiles_;
    emulate::run(
        dim3(unit, c_.kv_heads, lanes * (blocks / unit)), kThreads, unit, bytes,
        [&] { attend_kernel<T, C, D>(params_); }, seed);
  }

  // Row `head` of `heads` rows at `token`, normed and rotated.
  std::vector<double> prepared(const T* token, int heads, int head, const T* weight,
                               int position) const {
    const T* x = token + head * D;
    std::vector<double> y(D);
    for (int i = 0; i < D; ++i) y[i] = to_float(x[i]);
    if (c_.norm) {
      const bool all = c_.norm == 2;
      double sum = 0;
      for (int i = 0; i < (all ? heads * D : D); ++i) {
        sum += std::pow(to_float(all ? token[i] : x[i]), 2.0);
      }
      const double rms = std::sqrt(sum / (all ? heads * D : D) + 1e-6);
      for (int i = 0; i < D; ++i) {
        y[i] = rounded<T>(y[i] / rms * to_float(weight[all ? head * D + i : i]));
      }
    }
    std::vector<double> z = y;
    for (int i = 0; i < c_.rotary_dim; ++i) {
      const bool first = c_.interleaved ? i % 2 == 0 : i < c_.rotary_dim / 2;
      const int distance = c_.interleaved ? 1 : c_.rotary_dim / 2;
      const size_t at = static_cast<size_t>(position) * c_.rotary_dim + i;
      z[i] = rounded<T>(y[i] * cos_[at] + (first ? -y[i + distance] : y[i - distance]) * sin_[at]);
    }
    return z;
  }

  bool cache_is_right() const {
    const size_t row_bytes = D * sizeof(C);
    for (int b = 0; b < c_.batch; ++b) {
      for (int row = 0; row < c_.kv_heads * c_.slots; ++row) {
        const int g = row / c_.slots, slot = row % c_.slots, t = slot - c_.lengths[b];
        const size_t at = cache_at(b, g, slot);
        if (t < 0 || t >= c_.tokens) {
          if (std::memcmp(&k_cache_[at], &k_before_[at], row_bytes) != 0 ||
              std::memcmp(&v_cache_[at], &v_before_[at], row_bytes) != 0) {
            return false;
          }
          continue;
        }
        const size_t token = static_cast<size_t>(b * c_.tokens + t) * c_.kv_heads * D;
        const auto key = prepared(&k_[token], c_.kv_heads, g, k_weight_.data(), slot);
        for (int i = 0; i < D; ++i) {
          const C value = to_stored<C>(to_float(v_[token + g * D + i]) / v_scale_[g]);
          if (std::memcmp(&v_cache_[at + i], &value, sizeof(C)) != 0) return false;
          const double largest = 448.0 * k_scale_[g];
          const double wanted =
              kIsFp8<C> ? std::clamp(static_cast<double>(key[i]), -largest, largest) : key[i];
          const double error = std::fabs(wanted - k_scale_[g] * stored(k_cache_[at + i]));
          if (!(error <= (kIsFp8<C> ? 0.07 : 0.01) * (std::fabs(wanted) + 0.1))) return false;
        }
      }
    }
    return true;
  }

  double largest_error() const {
    double worst = 0;
    for (int row = 0; row < c_.batch * c_.tokens * c_.heads; ++row) {
      const int h = row % c_.heads, t = row / c_.heads % c_.tokens, b = row / c_.heads / c_.tokens;
      const int g = h / group_, position = c_.lengths[b] + t;
      const T* token = &q_[static_cast<size_t>(b * c_.tokens + t) * c_.heads * D];
      const auto query = prepared(token, c_.heads, h, q_weight_.data(), position);
      std::vector<double> o(D);
      double sum = 0;
      for (int slot = c_.window ? std::max(0, position - c_.window + 1) : 0; slot <= position;
           ++slot) {
        const size_t at = cache_at(b, g, slot);
        double score = 0;
        for (int i = 0; i < D; ++i) score += query[i] * k_scale_[g] * stored(k_cache_[at + i]);
        score *= scaling();
        if (c_.soft_cap > 0) score = c_.soft_cap * std::tanh(score / c_.soft_cap);
        const double weight = std::exp(score);
        sum += weight;
        for (int i = 0; i < D; ++i) o[i] += weight * v_scale_[g] * stored(v_cache_[at + i]);
      }
      for (int i = 0; i < D; ++i) {
        const double error =
            std::fabs(o[i] / sum - to_float(out_[static_cast<size_t>(row) * D + i]));
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
    return worst;
  }

  const Case c_;
  const int group_;
  int tiles_ = 0;
  AttendParams params_{};
  std::vector<T> q_, k_, v_, q_weight_, k_weight_, out_;
  std::vector<C> k_before_, v_before_, k_cache_, v_cache_;
  std::vector<float> cos_, sin_, k_scale_, v_scale_;
  std::vector<unsigned char> workspace_;
};

template <typename T, int D, typename C = T>
bool check(const Case& c) {
  return Check<T, D, C>(c).passes();
}

// Every FP8 number widens to itself, in the order that products expect.
bool check_widening() {
  bool good = true;
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    const float value = stored(Fp8{static_cast<__nv_fp8_storage_t>(code)});
    for (int place = 0; place < 4; ++place) {
      uint32_t halves[2], alternate[2];
      widen_halves(halves[0], halves[1], static_cast<uint32_t>(code) << 8 * place);
      widen_alternate(alternate[0], alternate[1], static_cast<uint32_t>(code) << 8 * place);
      for (int i = 0; i < 4; ++i) {
        const float wanted = i == place ? value : 0.0f;
        good = good && element<__half>(halves[i / 2], i % 2) == wanted &&
               element<__half>(alternate[i % 2], i / 2) == wanted;
      }
    }
  }
  if (!good) std::printf("FP8 numbers widen to others: FAILED\n");
  return good;
}

// Rows of any magnitude come to 1024 or just above, and back.
bool check_query_scales() {
  bool good = true;
  for (const float largest : {1.0f, 0.9f, 3e38f, 65504.0f, 1e-3f, 1e-34f}) {
    const QueryScale scale(largest);
    const float scaled = largest * scale.factor;
    good = good && scaled >= 1024.0f && scaled < 2048.0f && scale.factor * scale.inverse == 1.0f;
  }
  const QueryScale none(0.0f), smallest(1e-45f);
  good = good && std::isfinite(none.factor) && none.inverse > 0.0f && smallest.inverse > 0.0f;
  if (!good) std::printf("scales of queries: FAILED\n");
  return good;
}

// Blocks of a cluster that a launch takes, where 132 or 66 blocks can be resident.
bool check_choice() {
  struct {
    int slots, window, tokens, splits, lanes, places, cluster;
  } const choices[] = {
      {1, 0, 1, 1, 8, 132, 8},      {1024, 0, 1, 8, 8, 132, 8},    {2048, 0, 8, 16, 8, 132, 8},
      {2049, 0, 1, 17, 8, 132, 1},  {32768, 0, 1, 256, 8, 132, 1}, {1024, 0, 1, 8, 16, 132, 8},
      {1024, 0, 1, 8, 17, 132, 4},  {1024, 0, 1, 8, 32, 132, 4},   {1024, 0, 1, 8, 33, 132, 4},
      {1025, 0, 1, 9, 33, 132, 1},  {1024, 0, 1, 8, 64, 132, 2},   {1024, 0, 1, 8, 67, 132, 1},
      {1024, 0, 1, 8, 8, 66, 8},    {1024, 0, 1, 8, 9, 66, 4},     {8192, 1024, 1, 9, 4, 66, 8},
      {8192, 1, 1, 1, 8, 132, 8},   {8192, 1, 2, 2, 8, 132, 8},    {8192, 129, 1, 2, 8, 132, 8},
      {8192, 130, 1, 3, 8, 132, 8}, {8192, 889, 8, 8, 33, 132, 4}, {8192, 891, 8, 9, 33, 132, 1},
  };
  bool good = true;
  for (const auto& c : choices) {
    const int splits = most_splits(c.slots, c.window, c.tokens);
    const bool right = splits == c.splits &&
                       choose_cluster(splits, c.lanes, c.places, kMostClusterBlocks) == c.cluster;
    if (!right) std::printf("choice: %d slots, window %d: FAILED\n", c.slots, c.window);
    good = good && right;
  }
  return good;
}

int check_all() {
  using bf16 = __nv_bfloat16;
  bool good = check_choice() & check_widening() & check_query_scales();
  good &= check<bf16, 128>({"one token", 1, 1, 8, 2, 1024, {300}, 0, 1, false, 0, 128});
  good &= check<__half, 64>({"empty cache", 1, 1, 8, 2, 200, {0}, 0, 1, false, 0, 64});
  good &= check<bf16, 64>({"last slot", 1, 1, 8, 2, 130, {129}, 0, 2, true, 0, 20});
  good &= check<bf16, 64>({"many supers", 1, 1, 8, 1, 6000, {5000}, 0, 0, false, 0, 64});
  good &= check<bf16, 128>({"tokens over an edge", 1, 4, 8, 2, 2048, {1022}, 0, 1, false, 0, 128});
  good &= check<bf16, 64>({"sequences", 3, 2, 8, 2, 1100, {1023, 5, 127}, 0, 1, false, 0, 64});
  good &= check<bf16, 80>({"8 tokens of 5 heads", 1, 8, 5, 1, 300, {121}, 0, 0, true, 0, 24});
  good &= check<bf16, 96>({"window", 1, 3, 3, 1, 1500, {1200}, 200, 0, false, 5, 96});
  good &= check<__half, 192>({"no rotary", 1, 1, 7, 1, 300, {250}, 0, 0, false, 0, 0});
  good &= check<bf16, 64>({"32 rows", 1, 8, 4, 1, 1200, {1000}, 0, 1, false, 0, 64});
  good &= check<__half, 128>({"40 rows", 1, 5, 8, 1, 700, {640}, 0, 1, false, 0, 128});
  good &= check<bf16, 256>({"window of 1", 1, 2, 2, 1, 300, {200}, 1, 2, false, 0, 64});
  good &= check<bf16, 256>({"long window", 1, 2, 8, 1, 4000, {3500}, 2300, 1, false, 30, 256});
  good &= check<bf16, 128, Fp8>({"FP8", 1, 1, 8, 2, 1024, {300}, 0, 1, false, 0, 128});
  good &= check<__half, 64, Fp8>(
      {"FP8, sequences", 3, 2, 8, 2, 1100, {1023, 5, 127}, 0, 1, false, 0, 64});
  good &= check<bf16, 80, Fp8>({"FP8, 8 tokens", 1, 8, 5, 1, 300, {121}, 0, 0, true, 0, 24});
  good &= check<bf16, 96, Fp8>({"FP8, window", 1, 3, 3, 1, 1500, {1200}, 200, 0, false, 5, 96});
  good &= check<__half, 192, Fp8>({"FP8, no rotary", 1, 1, 7, 1, 300, {250}, 0, 0, false, 0, 0});
  good &= check<bf16, 256, Fp8>({"FP8, 16 rows", 1, 2, 8, 1, 1300, {1150}, 0, 2, false, 30, 256});
  good &= check<bf16, 64, Fp8>({"FP8, many", 1, 1, 8, 1, 3000, {2500}, 0, 0, false, 0, 64});
  return good ? 0 : 1;
}

}  // namespace
}  // namespace flashrt

int main() { return flashrt::check_all(); }
