-- Work on the keys of another task.
--@include task facts

-- From here on all functions work on the task with this prefix.
local function work_at(other)
  prefix, stream, task, puts = other, other .. 'stream', other .. 'task', other .. 'puts'
  known_rules = nil
end

-- While `work` runs, all functions work on the task with this prefix; after it, on this one again.
local function at_task(other, work)
  local own = prefix
  work_at(other)
  work()
  work_at(own)
end
