-- Read what `redrb doctor` compares: what a task counts, what is stored, and what nobody looks after any
-- more. Writes nothing.
-- KEYS[1] stream
-- ARGV    after: a consumer group; those behind it in the order of names are examined, '' for the first ones
-- Returns {figures, group ...} with a page of consumer groups; {} if there is no task
--         figures: a flat list name, number, ... of the task; empty but in the first page
--         group: {name, figures}
--@include task clock facts pending uncounted


local left = left_without_settings()
if not exists() and left == 0 then
  return {}
end
local now = reported_ms()

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
  return {group, figures}
end

local function report_task(all)
  local figures, report = reporter()
  report('now', now)
  report('groups', #all)
  report('entries', redis.call('XLEN', stream))
  report('facts', redis.call('HLEN', key('facts')))
  report('archived', redis.call('ZCARD', key('archive')))
  report('letters', redis.call('XLEN', key('dead')))
  local fault, orphans, more = fault_of_puts()
  report('lost_settings', math.min(left, 1))
  report('lost_puts', fault and 1 or 0)
  report('orphans', orphans or 0)
  report('more_orphans', more and 1 or 0)
  report('stuck_puts', stuck_in('#room'))
  report('stuck_admissions', stuck_in('#admission'))
  report('late_rights', redis.call('ZCOUNT', key('holds'), '-inf', string.format('%d', now)))
  local _, _, _, most = read_clock()
  report('lease_ms', 2 * (most or NO_LEASE_MS))
  return figures
end

local all, after = groups(), ARGV[1]
table.sort(all)
local found = {after == '' and report_task(all) or {}}
for _, group in ipairs(all) do -- bound: consumer groups
  if group > after and #found <= PAGE.examined_groups then
    found[#found + 1] = report_group(group)
  end
end
return found
