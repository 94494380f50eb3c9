-- One consistent look at a task from one consumer group. Writes nothing.
-- KEYS[1] stream
-- ARGV    group
-- Returns a flat list name, number, ... ; {} when the task does not exist.
--@include task facts index room

local found = {}
local function tell(name, value)
  found[#found + 1] = name
  found[#found + 1] = string.format('%.0f', value)
end
if not exists() then
  return found
end
local group, now = ARGV[1], now_ms()
local state = key('group', group)
local stored = stored_groups()
tell('stored', stored)
tell('archived', redis.call('ZCARD', key('archive')))
for _, name in ipairs({'limit', 'max_bytes', 'capacity', 'samples_put', 'bytes_put', 'version'}) do
  tell(name, number(task, name))
end
tell('dead_letters', redis.call('XLEN', key('dead')))
tell('producers_waiting', redis.call('ZCARD', key('queue', '#room')))
if redis.call('SISMEMBER', key('groups'), group) == 0 then
  -- it would find all that is stored, and waits for it
  tell('put', stored)
  tell('waiting', stored)
  return found
end
tell('joined', 1)
for _, name in ipairs({'put', 'waiting', 'acked', 'expired', 'filtered', 'evicted', 'dead',
  'samples_acked', 'returned', 'taken_over', 'reads'}) do
  tell(name, number(state, name))
end
tell('leased', redis.call('XPENDING', stream, group)[1])
tell('consumers', redis.call('ZCOUNT', key('consumers', group), '(' .. string.format('%.0f', now), '(+inf'))
local queued = 0
for _, status in ipairs(rules().indexed and STATUSES or {'completed'}) do
  local pool = pool_of(group, status)
  if rules().indexed then
    tell('waiting_' .. status, redis.call('ZCARD', key('ready', pool)))
  end
  queued = queued + redis.call('ZCARD', key('queue', pool)) + redis.call('ZCARD', key('queue', pool .. '?'))
end
tell('consumers_waiting', queued)
return found
