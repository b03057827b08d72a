"""Pipeline schedules as data, without jax: timetables, their rules, their cost, their drawings."""
