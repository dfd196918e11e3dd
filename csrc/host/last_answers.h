// Keeps the last answers of a search, for calls that ask the same again.
#pragma once

#include <array>
#include <cstddef>

namespace fastattn {

// Keeps kCount answers. The oldest makes room for a new one. Not for several threads: make it thread_local.
template <typename Question, typename Answer, size_t kCount>
class LastAnswers {
  public:
    // Returns the answer that is kept for the question, or else keeps and returns search().
    template <typename Search>
    Answer find_or(const Question& question, Search&& search) {
        for (size_t i = 0; i < count_ && i < kCount; ++i) {
            if (questions_[i] == question) return answers_[i];
        }
        const Answer answer = search();
        questions_[count_ % kCount] = question;
        answers_[count_++ % kCount] = answer;
        return answer;
    }

  private:
    std::array<Question, kCount> questions_{};
    std::array<Answer, kCount> answers_{};
    size_t count_ = 0;  // answers kept so far, with those that have made room
};

}  // namespace fastattn
