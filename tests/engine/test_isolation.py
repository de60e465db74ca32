"""`cache_salt` keeps what one tenant's requests leave behind from another's: neither the prefix cache nor the n-gram
memory answers across, which timing or accept lengths would show."""

from draftwing.core import TreeShape

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def test_nothing_is_read_across_salts(harness):
    h = harness
    model = h.tiny_model(seed=3)

    def ask(rig, uid, salt):
        # Seeded and warm, so that the text does not repeat itself: only a memory of it can draft it.
        rig.submit(uid, PROMPT, h.seeded(60, temperature=1.5), salt=salt)
        meta = rig.run().final[uid].meta
        return meta["cached_tokens"], meta["spec_accept_length"]

    rig = h.Rig(model, shapes=(TreeShape(7, 4, 8),), drafter="ngram")
    cold = ask(rig, "first of salt 7", salt=7)
    other = ask(rig, "first of salt 8", salt=8)
    none = ask(rig, "first without a salt", salt=0)
    again = ask(rig, "second of salt 8", salt=8)
    assert cold[0] == 0 and cold[1] < 1.5
    assert other == cold and none == cold, "an earlier request of another salt was of use"
    assert again[0] == len(PROMPT) - 1 and again[1] > 3.0, "there was nothing to be read"


def test_predictions_stay_with_their_request(harness):
    """The row of a request with a prediction goes to one without."""
    h = harness
    model = h.tiny_model(seed=3)
    rig = h.Rig(model, shapes=(TreeShape(6, 1, 7),), rows=1, radix=False)
    rig.submit("plain", PROMPT, h.greedy(30))
    text = rig.run().tokens["plain"]
    rig.submit("predicted", PROMPT, h.greedy(30), prediction=tuple(text))
    assert rig.run().final["predicted"].meta["spec_accept_length"] > 3.0
    rig.submit("after", PROMPT, h.greedy(30))
    got = rig.run()
    assert got.tokens["after"] == text and got.final["after"].meta["spec_num_proposed_drafts"] == 0
