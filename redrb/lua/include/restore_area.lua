-- The restore area of a task: a saved task is assembled there, unseen, before it replaces the task.
--
-- The area is itself a task whose keys begin with restoring:<token>: below the task's prefix, so every
-- function works on it. Its keys expire unless more parts come. The string restoring holds the token of
-- the newest area.
--@include task facts elsewhere

local home = prefix

-- From here on all functions work on the task with this stream, and restore areas are those of this task.
local function work_on(name)
  home = string.sub(name, 1, -7)
  work_at(home)
end

local function area_of(token)
  return home .. 'restoring:' .. token .. ':'
end

-- The number of groups that were ever put, with those that were dropped at their put.
local function ever_put()
  return number(puts, 'put') + number(task, 'filtered') + number(task, 'arrived_stale')
end

-- The number of entries, of dead letters, and of groups of which some parts wait.
local function stored_now()
  return redis.call('XLEN', stream) + redis.call('XLEN', key('dead'))
    + redis.call('HLEN', key('part_records'))
end

-- Whether the task holds all entries, and its consumer groups wait for all members, of a saved task.
local function is_whole(whole)
  if redis.call('XLEN', stream) ~= whole.entries
    or redis.call('HLEN', key('facts')) ~= whole.entries then
    return false
  end
  for group, expected in pairs(whole.members) do
    local members = 0
    for _, status in ipairs(STATUSES) do
      members = members + redis.call('ZCARD', key('ready', pool_of(group, status)))
    end
    if members ~= expected then
      return false
    end
  end
  return true
end

-- Names, below the prefix, of all keys that a restored task may have.
local function names_of_keys()
  local names = {'stream', 'task', 'puts', 'facts', 'groups', 'dead', 'buried', 'sources',
    'refreshed'}
  for _, origin in ipairs(redis.call('HKEYS', key('sources'))) do -- bound: tasks that stages forward from
    names[#names + 1] = 'sources:' .. origin
  end
  for _, group in ipairs(groups()) do
    for _, kind in ipairs({'group', 'deliveries', 'moved', 'expiries', 'reads', 'letters', 'clock',
      'staleness'}) do
      names[#names + 1] = kind .. ':' .. group
    end
    for _, status in ipairs(STATUSES) do
      local pool = pool_of(group, status)
      if redis.call('EXISTS', key('ready', pool)) == 1 then
        for _, kind in ipairs({'ready', 'versions', 'newest', 'mass'}) do
          names[#names + 1] = kind .. ':' .. pool
        end
      end
    end
  end
  return names
end

local function drop_area(token)
  at_task(area_of(token), function()
    for _, name in ipairs(names_of_keys()) do
      redis.call('UNLINK', prefix .. name)
    end
  end)
end
