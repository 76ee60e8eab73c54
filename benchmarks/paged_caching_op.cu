// The baseline that kvdock's Python calls are measured against: a C++ torch op with the same checks and a CUDA kernel with one
// block per token. Built by benchmarks/gpu_ops.py where nvcc is; no part of the package.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>

namespace {

// Rows move in 16-byte words; a row is `heads * dim` contiguous elements on both sides.
__global__ void paged_caching_kernel(uint4* k_cache, uint4* v_cache, const uint4* k, const uint4* v, const int64_t* slots,
                                     unsigned long long* skipped, int64_t capacity, int k_words, int v_words, int64_t k_row,
                                     int64_t v_row) {
  const int64_t token = blockIdx.x;
  const int64_t slot = slots[token];
  if (slot < 0) return;
  if (slot >= capacity) {
    if (threadIdx.x == 0) atomicAdd(skipped, 1ull);
    return;
  }
  for (int i = threadIdx.x; i < k_words; i += blockDim.x) k_cache[slot * k_words + i] = k[token * k_row + i];
  for (int i = threadIdx.x; i < v_words; i += blockDim.x) v_cache[slot * v_words + i] = v[token * v_row + i];
}

int64_t extent(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return (last + 1) * t.element_size();
}

void check_apart(const at::Tensor& source, const at::Tensor& cache, const char* name) {
  auto a = reinterpret_cast<uintptr_t>(source.data_ptr()), b = reinterpret_cast<uintptr_t>(cache.data_ptr());
  TORCH_CHECK(!(a < b + extent(cache) && b < a + extent(source)), name, " overlaps a cache");
}

void check_pair(const at::Tensor& cache, const at::Tensor& source, const at::Tensor& slots, const char* name) {
  TORCH_CHECK(cache.dim() == 4 && source.dim() == 3, name, ": wrong rank");
  TORCH_CHECK(source.device() == cache.device(), name, ": wrong device");
  TORCH_CHECK(source.scalar_type() == cache.scalar_type(), name, ": wrong dtype");
  TORCH_CHECK(source.size(0) == slots.size(0) && source.size(1) == cache.size(2) && source.size(2) == cache.size(3), name, ": wrong shape");
  TORCH_CHECK(source.stride(2) == 1 && cache.stride(3) == 1, name, ": innermost stride");
  TORCH_CHECK(source.stride(1) == source.size(2) && cache.is_contiguous(), name, ": rows are not dense");
  TORCH_CHECK(reinterpret_cast<uintptr_t>(source.data_ptr()) % 16 == 0 && source.stride(0) * source.element_size() % 16 == 0, name, ": alignment");
}

void paged_caching(at::Tensor k_cache, at::Tensor v_cache, at::Tensor k, at::Tensor v, at::Tensor slots, at::Tensor skipped) {
  TORCH_CHECK(k_cache.is_cuda() && v_cache.device() == k_cache.device() && slots.device() == k_cache.device(), "wrong device");
  TORCH_CHECK(slots.dim() == 1 && slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots");
  TORCH_CHECK(k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1), "caches disagree");
  check_pair(k_cache, k, slots, "k");
  check_pair(v_cache, v, slots, "v");
  for (const auto* cache : {&k_cache, &v_cache}) {
    check_apart(k, *cache, "k");
    check_apart(v, *cache, "v");
    check_apart(slots, *cache, "slots");
  }
  const int64_t tokens = slots.size(0);
  if (tokens == 0) return;
  const c10::cuda::CUDAGuard guard(k_cache.device());
  const int64_t per_word = 16 / k.element_size();
  const int k_words = k.size(1) * k.size(2) / per_word, v_words = v.size(1) * v.size(2) / per_word;
  const int threads = std::min(std::max(k_words, v_words), 512);
  paged_caching_kernel<<<tokens, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
      static_cast<uint4*>(k_cache.data_ptr()), static_cast<uint4*>(v_cache.data_ptr()), static_cast<const uint4*>(k.data_ptr()),
      static_cast<const uint4*>(v.data_ptr()), slots.data_ptr<int64_t>(), reinterpret_cast<unsigned long long*>(skipped.data_ptr()),
      k_cache.size(0) * k_cache.size(1), k_words, v_words, k.stride(0) / per_word, v.stride(0) / per_word);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// One block per token, as above; a slot that is negative or beyond the pool reads as zeros.
__global__ void gather_paged_kernel(const uint4* k_cache, const uint4* v_cache, uint4* k, uint4* v, const int64_t* slots, int64_t capacity,
                                    int k_words, int v_words) {
  const int64_t token = blockIdx.x;
  const int64_t slot = slots[token];
  const bool live = slot >= 0 && slot < capacity;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < k_words; i += blockDim.x) k[token * k_words + i] = live ? k_cache[slot * k_words + i] : zero;
  for (int i = threadIdx.x; i < v_words; i += blockDim.x) v[token * v_words + i] = live ? v_cache[slot * v_words + i] : zero;
}

std::tuple<at::Tensor, at::Tensor> gather_paged(at::Tensor k_cache, at::Tensor v_cache, at::Tensor slots) {
  TORCH_CHECK(k_cache.is_cuda() && v_cache.device() == k_cache.device() && slots.device() == k_cache.device(), "wrong device");
  TORCH_CHECK(slots.dim() == 1 && slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots");
  TORCH_CHECK(k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1), "caches disagree");
  const int64_t tokens = slots.size(0);
  auto k = at::empty({tokens, k_cache.size(2), k_cache.size(3)}, k_cache.options());
  auto v = at::empty({tokens, v_cache.size(2), v_cache.size(3)}, v_cache.options());
  check_pair(k_cache, k, slots, "k");
  check_pair(v_cache, v, slots, "v");
  for (const auto* out : {&k, &v}) {
    check_apart(k_cache, *out, "k_cache");
    check_apart(v_cache, *out, "v_cache");
    check_apart(slots, *out, "slots");
  }
  if (tokens == 0) return {k, v};
  const c10::cuda::CUDAGuard guard(k_cache.device());
  const int64_t per_word = 16 / k.element_size();
  const int k_words = k.size(1) * k.size(2) / per_word, v_words = v.size(1) * v.size(2) / per_word;
  const int threads = std::min(std::max(k_words, v_words), 512);
  gather_paged_kernel<<<tokens, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
      static_cast<const uint4*>(k_cache.data_ptr()), static_cast<const uint4*>(v_cache.data_ptr()), static_cast<uint4*>(k.data_ptr()),
      static_cast<uint4*>(v.data_ptr()), slots.data_ptr<int64_t>(), k_cache.size(0) * k_cache.size(1), k_words, v_words);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {k, v};
}

}  // namespace

TORCH_LIBRARY(kvdock_baseline, m) {
  m.def("gather_paged(Tensor k_cache, Tensor v_cache, Tensor slots) -> (Tensor, Tensor)");
  m.def("paged_caching(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots, Tensor(c!) skipped) -> ()");
}
TORCH_LIBRARY_IMPL(kvdock_baseline, CUDA, m) {
  m.impl("paged_caching", &paged_caching);
  m.impl("gather_paged", &gather_paged);
}
