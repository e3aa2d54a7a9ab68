import itertools

from paceline.data.seeds import child_seed, sample_seed


def test_seeds_are_the_same_in_every_process_and_python_version():
    assert child_seed(0) == 5789868883982397445
    assert child_seed(7, "order", 3) == 6874977109414893782
    assert sample_seed(7, "row:3", 2, 11) == 9199051466011037998


def test_seeds_fit_a_signed_64_bit_integer():
    seeds = [child_seed(master, "x", number) for master in range(10) for number in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # all 63 bits are used
    assert len(set(seeds)) == len(seeds)


def test_every_part_of_the_path_counts_and_parts_do_not_run_together():
    paths = [
        (),
        ("a",),
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("1",),
        (1,),
        (1, 1),
        (11,),
        (-1,),
        ("a", "b", "c"),
    ]
    assert len({child_seed(0, *path) for path in paths}) == len(paths)


def test_a_samples_seed_depends_on_run_prompt_sample_and_step_and_on_nothing_else():
    seeds = {
        sample_seed(master, prompt, sample, step)
        for master, prompt, sample, step in itertools.product(
            (0, 1), ("row:1", "row:11"), range(4), (-1, 0, 1)
        )
    }
    assert len(seeds) == 2 * 2 * 4 * 3
