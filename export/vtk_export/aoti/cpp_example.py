"""The C++ example beside a ``.pt2``: does what ``load.py`` does, for programs without Python."""

EXAMPLE = """\
// Classifies with model.pt2 from C++; README.md has the line that builds this.
//
//     ./example model.pt2 IMAGES COUNT
//
// IMAGES is a file of COUNT prepared images, one after another as README.md's `prepare` gives them: float32, channels
// first. The number of the most likely class of each is printed, and its logit.

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

using torch::inductor::AOTIModelPackageLoader;

// A loaded model.pt2; it may be called from several threads.
class Classifier {
 public:
  explicit Classifier(const std::string& path) {
    // Each library reads this once, at its first call. Without it, images of a wrong layout, size or type are answered
    // with wrong classes, or from memory beyond them.
    setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", /*replace=*/1);
    one_ = std::make_unique<AOTIModelPackageLoader>(path, "batch_1");
    more_ = std::make_unique<AOTIModelPackageLoader>(path, "batch_n");
    const auto facts = more_->get_metadata();
    std::istringstream sides(facts.at("vtk.input"));
    for (std::string side; std::getline(sides, side, ',');) shape_.push_back(std::stoll(side));
    max_batch_ = std::stoll(facts.at("vtk.max_batch"));
    const std::string precision = facts.at("vtk.precision");
    const auto type = precision == "fp32" ? at::kFloat : precision == "bf16" ? at::kBFloat16 : at::kHalf;
    options_ = at::TensorOptions().dtype(type).device(c10::Device(facts.at("AOTI_DEVICE_KEY")));
    // the first calls: each gets the other's batch, which it must refuse
    if (!refuses(*one_, 2) || !refuses(*more_, 1))
      throw std::runtime_error(path + " does not check its input; do not use it");
  }

  // Maps images (B, channels, height, width), of any layout and floating type, to logits (B, classes).
  at::Tensor operator()(const at::Tensor& images) {
    if (images.dim() != 4 || images.sizes().slice(1) != at::IntArrayRef(shape_) || images.size(0) < 1 ||
        images.size(0) > max_batch_ || !images.is_floating_point())
      throw std::invalid_argument("the model does not take these images");
    // a library reads plain memory: this copy is, whatever the layout, alignment or type was
    at::Tensor plain = at::empty(images.sizes(), options_);
    plain.copy_(images);
    // a call that fails beside others can leave them waiting for ever: one at a time
    const std::lock_guard<std::mutex> alone(mutex_);
    return (plain.size(0) == 1 ? *one_ : *more_).run({plain}).at(0);
  }

  const std::vector<int64_t>& shape() const { return shape_; }

 private:
  bool refuses(AOTIModelPackageLoader& model, int64_t batch) const {
    std::vector<int64_t> sizes{batch};
    sizes.insert(sizes.end(), shape_.begin(), shape_.end());
    try {
      model.run({at::zeros(sizes, options_)});
    } catch (const std::exception&) {  // also said on standard error
      return true;
    }
    return false;
  }

  std::unique_ptr<AOTIModelPackageLoader> one_, more_;
  std::vector<int64_t> shape_;
  int64_t max_batch_ = 0;
  at::TensorOptions options_;
  std::mutex mutex_;
};

int main(int count, char** words) {
  if (count != 4) {
    std::cerr << "usage: " << words[0] << " model.pt2 IMAGES COUNT\\n";
    return 2;
  }
  try {
    Classifier classify(words[1]);
    std::vector<int64_t> sizes{std::stoll(words[3])};
    sizes.insert(sizes.end(), classify.shape().begin(), classify.shape().end());
    at::Tensor images = at::empty(sizes, at::kFloat);
    std::ifstream file(words[2], std::ios::binary);
    const auto bytes = static_cast<std::streamsize>(images.nbytes());
    if (!file.read(static_cast<char*>(images.data_ptr()), bytes))
      throw std::runtime_error(std::string(words[2]) + " holds fewer images");
    const auto [logits, classes] = classify(images).to(at::kCPU, at::kFloat).max(1);
    for (int64_t i = 0; i < classes.size(0); ++i)
      std::cout << classes[i].item<int64_t>() << " " << logits[i].item<float>() << "\\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\\n";
    return 1;
  }
  return 0;
}
"""

BUILD = """\
TORCH=$(python -c 'import os, torch; print(os.path.dirname(torch.__file__))')
c++ -std=c++20 -O2 example.cpp -o example -I$TORCH/include -I$TORCH/include/torch/csrc/api/include \\
    -L$TORCH/lib -Wl,-rpath,$TORCH/lib -Wl,--no-as-needed -ltorch -ltorch_cpu{cuda} -lc10
./example model.pt2 images.f32 2
"""
"""Shell lines that build and run the example; ``{cuda}`` is further libraries."""
