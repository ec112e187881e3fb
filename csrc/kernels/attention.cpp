// attention: paged attention over a step's work list.
//
// A thread takes (item, KV head) pairs. A pair's queries are the item's rows times the query heads that share the KV
// head. A decode's few queries read keys and values once, where they lie; a prompt's many queries multiply packed panels
// of them, or tiles where there is AMX. Either way the scores of all keys of the item are in the thread's cache when they are normalised. Rows with
// several items are merged by the log-sum-exp of each part, as split-KV flash decoding does (Dao et al.).
#include "attention_few.h"
#include "attention_many.h"
#include "attention_tiles.h"
#include "quantized_cache.h"

namespace hr {
namespace HR_ISA {

namespace {

// Scratch memory of an item, in floats.
template <typename T, typename C>
int64_t item_floats(const Work& work) {
  if (work.num_rows == 1) return few_floats(work);
#if defined(__AMX_BF16__)
  if (fits_tiles<T, C>(work)) return TileSizes(work).total();
#endif
  return ManySizes(work).total();
}

template <typename T, typename C>
void run_item(const Work& work, float* memory) {
  if (work.num_rows == 1) return run_few<T, C>(work, memory);
#if defined(__AMX_BF16__)
  if (fits_tiles<T, C>(work)) return run_tiles<T, C>(work, memory);
#endif
  run_many<T, C>(work, memory);
}

bool are_decodes(const HrAttentionPlan& plan) {
  for (int64_t item = 0; item < plan.num_items; ++item)
    if (plan.item_num_rows[item] != 1) return false;
  return true;
}

template <typename T, typename C>
void run_work(const Work& work, Team& team) {
  run_item<T, C>(work, (float*)team.scratch((size_t)item_floats<T, C>(work) * sizeof(float)));
}

constexpr int64_t kWholeItems = 8;  // a thread: from so many on each takes all KV heads of an item, which lie side by side

// What comes next is taken ahead, so that it can be asked for. Only of decodes, which are short: a thread may be left
// with one more than the others.
template <typename T, typename C>
void run_decodes(const HrAttention& a, Team& team) {
  const int64_t heads = a.num_kv_heads, all = a.plan->num_items * heads;
  const int64_t grain = a.plan->num_items >= kWholeItems * team.size() ? heads : 1;
  for (int64_t first = team.take(all / grain) * grain; first < all;) {
    const int64_t next = team.take(all / grain) * grain;
    for (int64_t pair = first; pair < first + grain; ++pair) {
      Work work(a, pair / heads, pair % heads);
      const int64_t later = pair + 1 < first + grain ? pair + 1 : min64(next, all - 1);
      const Work following(a, later / heads, later % heads);
      work.following = &following;
      run_work<T, C>(work, team);
    }
    first = next;
  }
}

template <typename T, typename C>
void run_items(const HrAttention& a, Team& team) {
  if (are_decodes(*a.plan)) return run_decodes<T, C>(a, team);
  const int64_t all = a.plan->num_items * a.num_kv_heads;
  for (int64_t index; (index = team.take(all)) < all;)
    run_work<T, C>(Work(a, index / a.num_kv_heads, index % a.num_kv_heads), team);
}

// Keys or values of an item as fp32, from its first block on; returns where they are as a dense cache of one head, whose
// blocks follow one another.
HrCache decode_keys(const Work& work, const HrCache& cache, float* memory) {
  const int64_t dim = work.a.head_dim, size = work.plan.block_size, first = work.start / size;
  for (int64_t key = work.start; key < work.end; ++key) {
    const int64_t block = work.blocks[key / size], place = key % size;
    decode_token(cache.type, codes_at(cache, block, work.kv_head, place),
                 word_at(cache, block, work.kv_head, place), dim, memory + (key - first * size) * dim);
  }
  return {memory, size * dim, 0, dim, nullptr, 0, 0, HR_F32, 0};
}

// Over a quantized cache: every item's keys and values are decoded first.
template <typename T>
void run_quantized(const HrAttention& a, Team& team) {
  const int64_t all = a.plan->num_items * a.num_kv_heads, size = a.plan->block_size;
  for (int64_t index; (index = team.take(all)) < all;) {
    HrAttention decoded = a;
    Work work(decoded, index / a.num_kv_heads, index % a.num_kv_heads);
    const int64_t first = work.start / size, num_blocks = ceil_div(work.end, size);
    const int64_t keys = (num_blocks - first) * size * a.head_dim;
    const int64_t rest = item_floats<T, float>(work);
    float* memory = (float*)team.scratch((size_t)(2 * keys + rest + num_blocks) * sizeof(float));
    decoded.keys = decode_keys(work, a.keys, memory);
    decoded.values = decode_keys(work, a.values, memory + keys);
    int32_t* blocks = (int32_t*)(memory + 2 * keys + rest);
    for (int64_t block = 0; block < num_blocks; ++block) blocks[block] = (int32_t)(block < first ? 0 : block - first);
    work.blocks = blocks;
    run_item<T, float>(work, memory + 2 * keys);
  }
}

// One head of a merged row, from its partials.
void merge_head(const HrAttention& a, int64_t index, int64_t head, float* sums) {
  const HrAttentionPlan& plan = *a.plan;
  const int64_t dim = a.head_dim, first = plan.reduce_starts[index], last = plan.reduce_starts[index + 1];
  float top = -__builtin_inff(), weight = 0;
  for (int64_t p = first; p < last; ++p) {
    const float log_sum = plan.log_sums[plan.reduce_slots[p] * a.num_heads + head];
    top = log_sum > top ? log_sum : top;
  }
  for (int64_t i = 0; i < dim; ++i) sums[i] = 0;
  for (int64_t p = first; p < last; ++p) {
    const int64_t slot = plan.reduce_slots[p] * a.num_heads + head;
    const float share = expf(plan.log_sums[slot] - top);
    if (share == 0) continue;  // its partial may be anything
    weight += share;
    const float* partial = plan.partials + slot * dim;
    for (int64_t i = 0; i < dim; i += kLanes)
      store_some(sums + i, load_some(sums + i, dim - i) + splat(share) * load_some(partial + i, dim - i), dim - i);
  }
  const Vec factor = splat(1 / weight);
  with_type(a.out_dtype, [&](auto* type) {
    auto* out = (decltype(type))a.out + plan.reduce_rows[index] * a.out_stride + head * dim;
    for (int64_t i = 0; i < dim; i += kLanes)
      store_some(out + i, load_some(sums + i, dim - i) * factor, dim - i);
  });
}

}  // namespace

void attention(const void* args, Team& team) {
  const HrAttention& a = *(const HrAttention*)args;
  with_type(a.dtype, [&](auto* type) {
    if (a.keys.words != nullptr) return run_quantized<std::remove_pointer_t<decltype(type)>>(a, team);
    with_type(a.keys.type, [&](auto* cache) {
      run_items<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(cache)>>(a, team);
    });
  });
  if (a.plan->num_reductions == 0) return;
  team.barrier();
  float* sums = (float*)team.scratch((size_t)a.head_dim * sizeof(float));
  const int64_t all = a.plan->num_reductions * a.num_heads;
  for (int64_t index = team.rank(); index < all; index += team.size())
    merge_head(a, index / a.num_heads, index % a.num_heads, sums);
}

}  // namespace HR_ISA
}  // namespace hr
