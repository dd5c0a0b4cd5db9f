"""The metrics: against scikit-learn where it is installed, and against values of their own references."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_npu.finetune.run import metrics

PREDICTED = np.array([0, 1, 1, 0, 1, 1, 0, 0])
TRUE = np.array([0, 1, 0, 0, 1, 0, 1, 0])  # 2 hits of class 1, of 4 that were given and 3 that there are


def test_two_classes_by_hand() -> None:
    found = metrics.classification(PREDICTED, TRUE, classes=2)
    assert found == pytest.approx(
        {"accuracy": 5 / 8, "f1": 2 * 2 / (4 + 3), "matthews_correlation": (2 * 3 - 2 * 1) / 240**0.5}
    )


def test_f1_has_one_name_whatever_classes_a_model_guesses() -> None:
    """Of three classes the validation part has two; the model guesses the third in one epoch only."""
    third = np.where(PREDICTED == 0, 2, PREDICTED)
    for given in (PREDICTED, third):
        found = metrics.classification(given, TRUE, classes=3)
        assert list(found) == ["accuracy", "f1_macro", "matthews_correlation"]
    assert list(metrics.classification(third, TRUE, "mrpc", classes=3)) == ["accuracy", "f1"]


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("cola", ["matthews_correlation"]),
        ("mrpc", ["accuracy", "f1"]),
        ("qqp", ["accuracy", "f1"]),
        ("rte", ["accuracy"]),
    ],
)
def test_a_task_of_glue_reports_what_glue_does(task: str, names: list[str]) -> None:
    assert list(metrics.classification(PREDICTED, TRUE, task, classes=2)) == names


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_they_are_scikit_learn_s(classes: int, seed: int) -> None:
    reference = pytest.importorskip("sklearn.metrics")
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(seed)
    given, true = draw.integers(0, classes, 40), draw.integers(0, classes, 40)
    found = metrics.classification(given, true, classes=classes)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(true, given))
    assert found["matthews_correlation"] == pytest.approx(reference.matthews_corrcoef(true, given))
    if classes == 2:
        assert found["f1"] == pytest.approx(reference.f1_score(true, given))
    else:
        assert found["f1_macro"] == pytest.approx(reference.f1_score(true, given, average="macro"))
    numbers = draw.random(40)  # the integers have ties, which share ranks
    correlations = metrics.regression(given.astype(np.float32), numbers)
    assert correlations["pearson"] == pytest.approx(stats.pearsonr(given, numbers)[0])
    assert correlations["spearmanr"] == pytest.approx(stats.spearmanr(given, numbers)[0])


def test_what_is_not_defined_is_not_made_up() -> None:
    one_class = np.zeros(4, int)
    assert metrics.matthews_correlation(one_class, one_class) == 0.0  # as scikit-learn has it
    assert metrics.f1(one_class, one_class) == 0.0
    assert np.isnan(metrics.regression(one_class, np.arange(4))["pearson"])
    assert metrics.perplexity(1e4) == np.inf


def test_correlations_by_hand() -> None:
    one, other = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 9.0, 16.0])
    found = metrics.regression(one, other)
    assert found["pearson"] == pytest.approx(25 / (5 * 129) ** 0.5)  # centred: 25, 5, 129
    assert found["spearmanr"] == pytest.approx(1.0)


# what seqeval 1.2.2 finds (get_entities)
ENTITIES = {
    "B-PER I-PER O B-LOC": [("PER", 0, 1), ("LOC", 3, 3)],
    "I-PER I-PER O I-LOC": [("PER", 0, 1), ("LOC", 3, 3)],
    "B-PER B-PER": [("PER", 0, 0), ("PER", 1, 1)],
    "B-PER I-LOC I-LOC": [("PER", 0, 0), ("LOC", 1, 2)],
    "S-X E-X B-Y-Z I-Y-Z E-Y-Z S-X": [("X", 0, 0), ("X", 1, 1), ("Y-Z", 2, 4), ("X", 5, 5)],
    "O O": [],
}


@pytest.mark.parametrize("tags", ENTITIES)
def test_entities_are_seqeval_s(tags: str) -> None:
    assert metrics.entities(tags.split()) == ENTITIES[tags]


def test_an_entity_is_right_as_a_whole() -> None:
    given = [["B-MISC", "I-MISC", "O", "O"], ["B-PER", "I-PER", "O"]]
    true = [["B-MISC", "O", "O", "O"], ["B-PER", "I-PER", "O"]]
    assert metrics.tagging(given, true) == pytest.approx(
        {"accuracy": 6 / 7, "precision": 0.5, "recall": 0.5, "f1": 0.5}
    )


def test_the_same_entity_in_two_rows_counts_twice() -> None:
    rows = [["B-PER"], ["B-PER"]]
    assert metrics.tagging(rows, [["B-PER"], ["O"]])["precision"] == 0.5


def test_parts_of_speech_have_no_entities() -> None:
    assert metrics.tagging([["DT", "NN"]], [["DT", "VB"]]) == {"accuracy": 0.5}


def test_answers_as_squad_compares_them() -> None:
    found = metrics.answers(
        ["The Eiffel Tower!", "in the year 1066", "", "Rome"],
        [["Eiffel tower"], ["1066", "the year 1066"], [], []],
    )
    # the second: 2 words of {in, year, 1066} are the 2 of {year, 1066}: 2 * 2 / 5; the last should be silent
    assert found == pytest.approx({"exact_match": 50.0, "f1": 100 * (1 + 0.8 + 1 + 0) / 4})


def test_overlaps_as_rouge_counts_them() -> None:
    # police and the gunman are in both, in this order: 3 of 4 and 4 words (Lin, 2004, section 3.1)
    assert metrics.rouge_l("police the gunman", "police killed the gunman") == pytest.approx(6 / 7)
    assert metrics.rouge_l("the gunman kill police", "police killed the gunman") == pytest.approx(0.5)
    assert metrics.overlap(["A b", "c"], ["a b", "c"]) == {"exact_match": 0.5, "rouge_l": 1.0}
    assert metrics.rouge_l("", "") == 0.0
