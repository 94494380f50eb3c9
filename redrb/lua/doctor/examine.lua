-- Read what `redrb doctor` compares: what a task counts, what is stored, and what nobody looks after any
-- more. Writes nothing, and looks at the first few of everything.
-- KEYS[1] stream
-- Returns {figures, group ...}; {} if there is no task
--         figures: a flat list name, number, ... of the task
--         group: {name, figures, {dead consumer ...}}
--@include task clock facts pending uncounted


if not exists() then
  return {}
end
local now = reported_ms()
local over = string.format('%d', now)

local function reporter()
  local figures = {}
  return figures, function(name, value)
    figures[#figures + 1] = name
    figures[#figures + 1] = string.format('%d', value)
  end
end

-- How many of the first waiters in a queue do not look any more.
local function stuck_in(queue)
  local waiters = redis.call('ZRANGE', key('queue', queue), 0, PAGE.examined_waiters - 1)
  local needs, stuck = #waiters > 0 and redis.call('HMGET', key('needs', queue), unpack(waiters)) or {}, 0
  for i = 1, #waiters do
    local deadline = tonumber(string.match(needs[i] or '0 0 0', '^%d+ (%d+) '))
    stuck = stuck + ((deadline or 0) <= now and 1 or 0)
  end
  return stuck
end

-- How many rights to begin groups the first makers hold whose deadline is over.
local function rights_of_the_dead()
  local held = 0
  for _, maker in ipairs(redis.call('ZRANGEBYSCORE', key('makers'), '-inf', over, 'LIMIT', 0,
    PAGE.examined_consumers)) do
    held = held + redis.call('ZLEXCOUNT', key('holders'), '[' .. maker .. '/', '(' .. maker .. '0')
  end
  return held
end

local function report_group(group)
  local figures, report = reporter()
  local waiting, stuck = 0, 0
  for _, status in ipairs(STATUSES) do
    local pool = pool_of(group, status)
    waiting = waiting + redis.call('ZCARD', key('ready', pool))
    stuck = stuck + stuck_in(pool)
  end
  report('waiting', waiting)
  report('leased', count_leased(group))
  report('stuck_takes', stuck)
  report('joining', redis.call('EXISTS', key('joining', group)))
  report('letters', redis.call('ZCARD', key('letters', group)))
  local dead = redis.call('ZRANGEBYSCORE', key('consumers', group), '-inf', over, 'LIMIT', 0,
    PAGE.examined_consumers)
  return {group, figures, dead}
end

local figures, report = reporter()
local all = groups()
table.sort(all)
report('groups', #all)
report('entries', redis.call('XLEN', stream))
report('facts', redis.call('HLEN', key('facts')))
report('archived', redis.call('ZCARD', key('archive')))
report('letters', redis.call('XLEN', key('dead')))
local orphans, uncounted, more = uncounted_entries()
report('orphans', uncounted == 0 and orphans or 0)
report('more_uncounted', more and 1 or 0)
report('uncounted', uncounted)
report('lost_puts', 1 - redis.call('HEXISTS', puts, 'last'))
report('stuck_puts', stuck_in('#room'))
report('stuck_admissions', stuck_in('#admission'))
report('lost_rights', rights_of_the_dead() + redis.call('ZCOUNT', key('holds'), '-inf', over))
local _, _, _, most = read_clock()
report('lease_ms', 2 * (most or NO_LEASE_MS))
local found = {figures}
for i = 1, math.min(#all, PAGE.examined_groups) do
  found[#found + 1] = report_group(all[i])
end
return found
