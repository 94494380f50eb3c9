-- Read what `redrb doctor` compares: what a task counts, what is stored, and what nobody looks after any
-- more. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `Examine` of redrb/watch/doctor/calls.py
-- Returns its reply
--@include task clock facts pending unrecorded

local ask, left = cmsgpack.unpack(ARGV[1]), left_without_settings()
if not exists() and left == 0 then
  return cmsgpack.pack(nil)
end
local now = reported_ms()

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
  local waiting, stuck = 0, 0
  for _, status in ipairs(STATUSES) do
    local pool = pool_of(group, status)
    waiting = waiting + redis.call('ZCARD', key('ready', pool))
    stuck = stuck + stuck_in(pool)
  end
  return {
    name = group,
    waiting = waiting,
    leased = count_leased(group),
    stuck_takes = stuck,
    joining = redis.call('EXISTS', key('joining', group)) == 1,
    letters = redis.call('ZCARD', key('letters', group)),
  }
end

local function report_task(all)
  local fault, orphans, more = fault_of_puts()
  local _, _, _, most = read_clock()
  return {
    now = now,
    groups = #all,
    entries = redis.call('XLEN', stream),
    facts = redis.call('HLEN', key('facts')),
    letters = redis.call('XLEN', key('dead')),
    lost_settings = left > 0,
    lost_puts = fault and true or false,
    orphans = orphans or 0,
    more_orphans = more or false,
    stuck_puts = stuck_in('#room'),
    stuck_admissions = stuck_in('#admission'),
    late_rights = redis.call('ZCOUNT', key('holds'), '-inf', string.format('%d', now)),
    lease_ms = 2 * (most or NO_LEASE_MS),
  }
end

local all, found = known_groups(), {}
for _, group in ipairs(all) do -- bound: consumer groups
  if group > ask.after and #found < PAGE.examined_groups then
    found[#found + 1] = report_group(group)
  end
end
return cmsgpack.pack({task = ask.after == '' and report_task(all) or nil, groups = found})
