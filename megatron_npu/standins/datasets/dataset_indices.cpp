// Indices of datasets, as upstream's extension computes them: which samples a blend takes from which dataset,
// and where samples of documents begin and end. compiled_dataset_indices.py says what the functions are given.
//
// No product is fused with a sum (-ffp-contract=off): the rounding of each decides which dataset is next.

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kFew = 16;  // datasets, for which lanes do not pay
typedef double Lanes __attribute__((vector_size(8 * kLanes)));
typedef int64_t Numbers __attribute__((vector_size(8 * kLanes)));
constexpr int32_t kLongSentence = 512;  // tokens; a document with a longer sentence is left out

struct Blend {
  double* weights;
  double* taken;  // samples of each dataset so far, exact to 2^53; infinite: it is never taken
  const double* limits;  // samples that each dataset has; or nothing: they may be taken again
  int64_t datasets, room;  // the latter a multiple of kLanes; what is behind the datasets is never taken
};

Lanes loaded(const double* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// Which dataset lags most behind its weight: of equals the first. For a few; weights may be no numbers.
int64_t most_behind_of_few(const double* weights, const double* taken, int64_t datasets, double position) {
  int64_t found = 0;
  double most = weights[0] * position - taken[0];
  for (int64_t i = 1; i < datasets; ++i) {
    const double lag = weights[i] * position - taken[i];
    if (lag > most) {
      most = lag;
      found = i;
    }
  }
  return found;
}

// The same for many: lanes keep maxima of their own.
int64_t most_behind_of_many(const double* weights, const double* taken, int64_t room, double position) {
  Lanes most = weights[0] * position - taken[0] + Lanes{};
  Numbers which{}, here{0, 1, 2, 3, 4, 5, 6, 7};
  for (int64_t i = 0; i < room; i += kLanes, here += kLanes) {
    const Lanes lag = loaded(weights + i) * position - loaded(taken + i);
    const Numbers more = lag > most;
    most = more ? lag : most;
    which = more ? here : which;
  }
  const Numbers lanes{0, 1, 2, 3, 4, 5, 6, 7};
  for (int64_t apart = kLanes / 2; apart > 0; apart /= 2) {  // no branches, which nobody could predict
    const Lanes other = __builtin_shuffle(most, lanes ^ apart);
    const Numbers its = __builtin_shuffle(which, lanes ^ apart);
    const Numbers more = (other > most) | ((other == most) & (its < which));
    most = more ? other : most;
    which = more ? its : which;
  }
  return which[0];
}

int64_t most_behind(const Blend& given, double position) {
  return given.datasets <= kFew ? most_behind_of_few(given.weights, given.taken, given.datasets, position)
                                : most_behind_of_many(given.weights, given.taken, given.room, position);
}

// Samples [begin, end) of a blend.
template <typename Index>
void blend(const Blend& given, int64_t begin, int64_t end, Index* dataset_index, int64_t* sample_index) {
  for (int64_t sample = begin; sample < end; ++sample) {
    const double position = sample > 1 ? static_cast<double>(sample) : 1.0;
    const int64_t chosen = most_behind(given, position);
    dataset_index[sample] = static_cast<Index>(chosen);
    sample_index[sample] = static_cast<int64_t>(given.taken[chosen]);
    given.taken[chosen] += 1;
    if (given.limits && given.taken[chosen] == given.limits[chosen]) {  // never again
      given.weights[chosen] = 0;
      given.taken[chosen] = std::numeric_limits<double>::infinity();
    }
  }
}

struct Document {
  int64_t number, first, last;  // sentences [first, last)
};

// Documents that give samples: those of `least` sentences and more, unless they have `checked_from` or more
// of which one is long.
std::vector<Document> usable(const int64_t* docs, int64_t documents, const int32_t* sizes, int64_t least,
                             int64_t checked_from) {
  std::vector<Document> found;
  for (int64_t number = 0; number < documents; ++number) {
    const int64_t first = docs[number], last = docs[number + 1];
    bool kept = last - first >= (least > 1 ? least : 1);
    if (last - first >= checked_from)
      for (int64_t sentence = first; kept && sentence < last; ++sentence) kept = sizes[sentence] <= kLongSentence;
    if (kept) found.push_back({number, first, last});
  }
  return found;
}

// The sentence after the last one of the sample that begins with `first`: it has `target` tokens and `least`
// sentences, and leaves more than `left_over`; where that cannot be, it takes the rest of the document.
int64_t end_of_sample(const int32_t* sizes, int64_t first, int64_t last, int64_t target, int64_t least,
                      int64_t left_over) {
  int64_t tokens = 0;
  for (int64_t end = first + 1; last - end > left_over; ++end) {
    tokens += sizes[end - 1];
    if (tokens >= target && end - first >= least) return end;
  }
  return last;
}

// Rows of numbers, in the order of Fisher and Yates.
template <typename Number, int kColumns>
void shuffle(std::vector<Number>& rows, int64_t seed) {
  std::mt19937_64 numbers(static_cast<uint64_t>(seed));
  for (int64_t last = static_cast<int64_t>(rows.size()) / kColumns - 1; last > 0; --last) {
    const int64_t other = static_cast<int64_t>(numbers() % static_cast<uint64_t>(last + 1));
    for (int column = 0; column < kColumns; ++column)
      std::swap(rows[kColumns * last + column], rows[kColumns * other + column]);
  }
}

struct Sentences {
  const int64_t* docs;
  int64_t documents;
  const int32_t* sizes;
  const int32_t* titles;  // tokens of each document's title; of build_mapping nothing
  int64_t epochs;
  uint64_t most;  // samples: an epoch that begins with fewer is taken whole
  int64_t length, ratio, seed, least;
};

template <typename Number>
void mapping(const Sentences& given, std::vector<Number>& rows) {
  const auto documents = usable(given.docs, given.documents, given.sizes, given.least, 2);
  std::mt19937 numbers(static_cast<uint32_t>(given.seed));
  const auto target_length = [&]() -> int64_t {
    if (given.ratio == 0) return given.length;
    const uint32_t number = static_cast<uint32_t>(numbers());
    return number % given.ratio == 0 ? 2 + number % (given.length - 1) : given.length;
  };
  for (int64_t epoch = 0; epoch < given.epochs && rows.size() / 3 < given.most && !documents.empty(); ++epoch) {
    for (const Document& document : documents) {
      int64_t target = target_length();
      for (int64_t first = document.first; first < document.last;) {
        const int64_t end = end_of_sample(given.sizes, first, document.last, target, given.least, 1);
        rows.insert(rows.end(), {static_cast<Number>(first), static_cast<Number>(end), static_cast<Number>(target)});
        first = end;
        target = target_length();
      }
    }
  }
  shuffle<Number, 3>(rows, given.seed + 1);
}

template <typename Number>
void blocks(const Sentences& given, std::vector<Number>& rows) {
  const int64_t least = given.least;
  const auto documents = usable(given.docs, given.documents, given.sizes, least, least);
  for (int64_t epoch = 0; epoch < given.epochs && rows.size() / 4 < given.most && !documents.empty(); ++epoch) {
    int64_t block = 0;
    for (const Document& document : documents) {
      const int64_t target = given.length - given.titles[document.number];
      for (int64_t first = document.first; first < document.last;) {
        const int64_t end = end_of_sample(given.sizes, first, document.last, target, least, least - 1);
        rows.insert(rows.end(), {static_cast<Number>(first), static_cast<Number>(end),
                                 static_cast<Number>(document.number), static_cast<Number>(block++)});
        first = end;
      }
    }
  }
  shuffle<Number, 4>(rows, given.seed + 1);
}

// Rows that Python makes room for and then takes; nothing where there was no memory for them.
template <typename Number>
void* made(const Sentences& given, bool of_blocks, int64_t* size) {
  std::vector<Number>* rows = nullptr;
  try {
    rows = new std::vector<Number>();
    of_blocks ? blocks(given, *rows) : mapping(given, *rows);
  } catch (const std::bad_alloc&) {
    delete rows;
    return nullptr;
  }
  *size = static_cast<int64_t>(rows->size());
  return rows;
}

template <typename Number>
void take(void* made, void* target) {
  auto* rows = static_cast<std::vector<Number>*>(made);
  if (!rows->empty()) std::memcpy(target, rows->data(), rows->size() * sizeof(Number));
  delete rows;
}

}  // namespace

extern "C" {

void blend_uint8(const Blend* given, int64_t begin, int64_t end, uint8_t* dataset_index, int64_t* sample_index) {
  blend(*given, begin, end, dataset_index, sample_index);
}

void blend_int16(const Blend* given, int64_t begin, int64_t end, int16_t* dataset_index, int64_t* sample_index) {
  blend(*given, begin, end, dataset_index, sample_index);
}

void samples_of_documents(const int32_t* sizes, const int32_t* order, int64_t documents, int64_t samples,
                          int64_t length, int64_t extra, int64_t* result) {
  result[0] = result[1] = 0;
  int64_t document = 0, before = 0;  // tokens before that document
  for (int64_t sample = 1; sample <= samples; ++sample) {
    const int64_t begin = sample * length;
    while (document < documents && before + sizes[order[document]] < begin + extra)
      before += sizes[order[document++]];
    const bool beyond = document == documents;
    result[2 * sample] = beyond ? documents - 1 : document;
    result[2 * sample + 1] = beyond ? sizes[order[documents - 1]] - extra : begin - before;
  }
}

void* make_rows(const Sentences* given, int of_blocks, int wide, int64_t* size) {
  return wide ? made<uint64_t>(*given, of_blocks != 0, size) : made<uint32_t>(*given, of_blocks != 0, size);
}

void take_rows(void* made, int wide, void* target) {
  wide ? take<uint64_t>(made, target) : take<uint32_t>(made, target);
}

int64_t size_of_blend() { return sizeof(Blend); }

int64_t size_of_sentences() { return sizeof(Sentences); }
}
