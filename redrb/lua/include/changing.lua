-- Changes settings of a task.
--
-- The list changes holds the newest changes, packed by msgpack: {setting, old value, new value, ms, who}; a
-- value of '' is none, and `who` is as the client gave it.
-- The field implied of the task names the settings that no user gave, such as limits that follow from the
-- batch size of a trainer; the field configured those that task/configure has changed or removed, which hold
-- whatever a process gives that opens the task (order and tags are not among them, because a
-- process works by them itself); the field generation counts the changes.
--@include task clock facts settings waiters queries

local HIDDEN = {format = true, sampled = true}

-- Whether a value of a setting would need a look at groups that are stored: they are sorted by the order that
-- the task had when they were put.
local function needs_empty(name, value)
  return name == 'order' and (value or 'fifo') ~= (redis.call('HGET', task, 'order') or 'fifo')
    and redis.call('EXISTS', key('facts')) == 1 and redis.call('HEXISTS', task, 'rebuilt') == 0
end

-- Record a change.
local function record(name, old, new, who)
  if not HIDDEN[name] then
    redis.call('LPUSH', key('changes'), cmsgpack.pack({name, old or '', new or '', server_ms(), who}))
    redis.call('LTRIM', key('changes'), 0, PAGE.changes - 1)
  end
end

-- Let all that wait look again: a change may let them go on, or make what they wait for impossible.
local function wake_all(now)
  local queues = {'#room', '#admission'}
  for _, group in ipairs(groups()) do
    for _, status in ipairs(STATUSES) do
      local pool = pool_of(group, status)
      local queries = queries_of(pool)
      queues[#queues + 1] = pool
      for i = 1, #queries, 2 do
        queues[#queues + 1] = queue_of(pool, queries[i])
      end
    end
  end
  for _, queue in ipairs(queues) do
    wake(queue, math.huge, now) -- bound: PAGE.waiters
  end
end

-- Delete an index of all pools that the task needs no more: a kind of sorted set.
local function drop_index(kind)
  for _, group in ipairs(groups()) do
    for _, status in ipairs(STATUSES) do
      redis.call('UNLINK', key(kind, pool_of(group, status)))
    end
  end
end

-- Begin the work that changed settings cause; `old` and `new` hold their values, false for none.
local function follow(old, new)
  local used = number(puts, 'put') > 0
  if new.max_bytes ~= nil and tonumber(new.max_bytes or '0') > 0 and tonumber(old.max_bytes or '0') == 0 then
    redis.call('HSET', task, 'sized_after', number(puts, 'last'), 'bytes', '0')
  end
  for setting, index in pairs({max_staleness = 'versions', max_token_staleness = 'newest'}) do
    if new[setting] == false then
      drop_index(index)
    end
  end
  if new.order ~= nil and (new.order or 'fifo') ~= (old.order or 'fifo') then
    --@include places
    restart_places()
  end
  local added = new.max_staleness and not old.max_staleness
    or new.max_token_staleness and not old.max_token_staleness
  if added and used then
    redis.call('HSET', task, 'filling', '0')
  end
  if new.max_dead ~= nil then
    --@include dead_letters
    if excess_letters() > 0 then
      redis.call('HSET', task, 'shedding', '1')
    end
  end
  pack_rules()
  known_rules = nil
  wake_all(now_ms())
  if new.tags ~= nil then
    drop_index('queries')
  end
end

-- Change settings: name -> value, false for none; those that have the value already stay as they are.
-- Returns whether one has changed.
local function change(values, revision, who)
  local old, new, changed = {}, {}, false
  for name, value in pairs(values) do
    local stored = redis.call('HGET', task, name)
    if stored ~= value then
      old[name], new[name], changed = stored, value, true
      if value then
        redis.call('HSET', task, name, value)
      else
        redis.call('HDEL', task, name)
      end
      record(name, stored, value, who)
    end
  end
  if changed then
    redis.call('HSET', task, 'revision', revision)
    follow(old, new)
  end
  return changed
end

-- The settings that the field implied or configured names: a table by name.
local function noted_settings(field)
  local found = {}
  for name in string.gmatch(redis.call('HGET', task, field) or '', '%S+') do
    found[name] = true
  end
  return found
end

local function note_settings(field, noted)
  local names = {}
  for name in pairs(noted) do
    names[#names + 1] = name
  end
  if #names > 0 then
    redis.call('HSET', task, field, table.concat(names, ' '))
  else
    redis.call('HDEL', task, field)
  end
end
