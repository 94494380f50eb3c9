-- Give a maker rights to begin groups, or queue it for them.
-- KEYS[1] stream
-- ARGV    the call `Admit` of redrb/stream/admission/calls.py
-- Returns its reply
--@include task clock facts waiters permissions

check_permissions(KEYS[1])
begin_writing()
local ask, rule = cmsgpack.unpack(ARGV[1]), rules()
if not rule.exists or rule.incarnation ~= ask.incarnation then
  return cmsgpack.pack({outcome = 'gone'})
end
local waiter, least, now = ask.waiter, ask.least, set_clock(ask.lease_ms)
if not rule.max_staleness or rule.max_reads ~= 1 then
  dequeue('#admission', waiter)
  return cmsgpack.pack({outcome = 'refused'})
end

local function queue()
  if ask.ttl_ms > 0 then
    enqueue('#admission', waiter, least, ask.ttl_ms, now)
  else
    dequeue('#admission', waiter)
  end
end

if not rule.groups_per_version then
  queue()
  return cmsgpack.pack({outcome = 'unset'})
end
--@include admission held_rights late_makers
redis.call('HSETNX', key('admission'), 'series', ask.series)
local series = redis.call('HGET', key('admission'), 'series')
local given = rights_of(waiter, -1)
if #given > 0 then
  return cmsgpack.pack({outcome = 'granted', series = series, version = rule.version, numbers = given})
elseif least > most_rights() then
  dequeue('#admission', waiter)
  wake_rights(now)
  return cmsgpack.pack({outcome = 'never', most = most_rights()})
end
local _, more = reclaim_rights(now)
local state = state_of_rights()
local left, released = allowed_rights(state, least, now)
local free = left >= least and left - reserved_before('#admission', waiter, now, left, least) or 0
if free < least then
  queue()
  wake_rights(now)
  local age = state.oldest_ms and math.max(now - state.oldest_ms, 0) or 0
  return cmsgpack.pack({outcome = 'wait', version = rule.version, more = more, held = state.held,
    stored = state.stored, trained = math.floor(state.trained - state.mark), most = state.most,
    waiting = redis.call('ZCARD', key('queue', '#admission')), oldest_ms = math.floor(age),
    oldest_maker = string.match(state.oldest_waiter or '', '^[^/]*'),
    makers = late_makers(now, ask.lease_ms)})
end

local amount = math.min(ask.count, free)
local first, rights, records, holders, holds = state.granted + 1, {}, {}, {}, {}
local version = rule.version and string.format('%d', rule.version) or '-'
local record = string.format('%s %.17g %.0f %s', version, state.mark, now, waiter)
local deadline = string.format('%.0f', now + ask.hold_ms)
for i = 1, amount do -- bound: rights of the request, 4,096 at most (MOST_RIGHTS)
  local at, number = 2 * i - 1, string.format('%d', first + i - 1)
  given[i] = number
  rights[at], rights[at + 1] = number, number
  records[at], records[at + 1] = number, record
  holders[at], holders[at + 1] = '0', waiter .. '/' .. number
  holds[at], holds[at + 1] = deadline, number
end
in_parts('ZADD', key('rights'), rights)
in_parts('ZADD', key('holders'), holders)
in_parts('ZADD', key('holds'), holds)
in_parts('HSET', key('right'), records)
redis.call('HSET', key('admission'), 'granted', string.format('%d', first + amount - 1))
redis.call('ZADD', key('makers'), string.format('%.0f', now + ask.lease_ms),
  string.match(waiter, '^[^/]+'))
dequeue('#admission', waiter)
wake_rights(now)
return cmsgpack.pack({outcome = 'granted', series = series, version = rule.version, numbers = given,
  released = released})
