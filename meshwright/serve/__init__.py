"""From a model to answers: paged cache, scheduler, sampler, runner and the engine that puts them together."""
