"""Zero-shot metrics against a dense top-k."""

import pytest
import torch

from hf_infcl.evaluation import zero_shot_metrics


def random_problem(n=200, classes=12, d=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    class_embeds = torch.randn(classes, d, generator=generator)
    labels = torch.randint(0, classes, (n,), generator=generator)
    return class_embeds[labels] + 2 * torch.randn(n, d, generator=generator), labels, class_embeds


@pytest.mark.parametrize("block_size", [None, 7])
def test_accuracy_matches_a_dense_topk(block_size):
    images, labels, classes = random_problem()
    scores = images.double() @ classes.double().T
    got = zero_shot_metrics(images, labels, classes, ks=(1, 5), block_size=block_size)
    for k in (1, 5):
        hit = (scores.topk(k, dim=1).indices == labels[:, None]).any(dim=1)
        assert got[f"accuracy@{k}"] == pytest.approx(hit.double().mean().item())
    first = scores.argmax(dim=1) == labels
    per_class = [first[labels == c].double().mean() for c in labels.unique()]
    assert got["mean_per_class_accuracy"] == pytest.approx(torch.stack(per_class).mean().item())


def test_classes_without_images_do_not_weigh():
    got = zero_shot_metrics(torch.eye(3)[:2], [0, 1], torch.eye(3), ks=(1,))
    assert got == {"accuracy@1": 1.0, "mean_per_class_accuracy": 1.0}


def test_k_beyond_the_classes_is_one_and_said_once(caplog):
    images, labels, classes = random_problem(classes=3)
    for _ in range(2):
        assert zero_shot_metrics(images, labels, classes, ks=(1, 5))["accuracy@5"] == 1.0
    assert sum("accuracy@5 is 1.0 whatever the model" in record.message for record in caplog.records) == 1


def test_classes_of_one_name_are_merged():
    classes = torch.eye(3)[[0, 1, 0]]
    got = zero_shot_metrics(torch.eye(3)[[0, 0, 1]], [0, 2, 1], classes, ks=(1,), class_names=["bat", "dog", "bat"])
    assert got == {"accuracy@1": 1.0, "mean_per_class_accuracy": 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_classes_are_refused(dtype):
    with pytest.raises(ValueError, match="classes 0 and 2 have the very same embedding"):
        zero_shot_metrics(torch.eye(3, dtype=dtype), [0, 1, 2], torch.eye(3, dtype=dtype)[[0, 1, 0]])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(labels=[0, 1, 3]), r"labels\[2\] is 3; expected 0 to 2 for 3 class_embeds"),
        (dict(labels=[0, -1, 1]), r"labels\[1\] is -1"),
        (dict(labels=[0, 1]), r"labels has shape \(2,\)"),
        (dict(labels=[[0, 1]] * 3), "one class an image"),
        (dict(labels=[0.0, 1.0, 2.0]), "expected integers"),
        (dict(class_embeds=torch.eye(4)), "image_embeds has width 3 and class_embeds 4"),
        (dict(class_names=["a"]), "class_names has 1 names for 3 class_embeds"),
        (dict(image_embeds=torch.eye(3) * float("nan")), "image_embeds: 3 of 3 embeddings are NaN"),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    good = dict(image_embeds=torch.eye(3), labels=[0, 1, 2], class_embeds=torch.eye(3))
    with pytest.raises(ValueError, match=said):
        zero_shot_metrics(**{**good, **arguments})
