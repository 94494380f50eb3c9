-- Give a maker rights to begin groups, or queue it for them.
-- KEYS[1] stream
-- ARGV    waiter, count, least, ttl_ms, lease_ms, hold_ms, incarnation, series
--         waiter: "<maker>/<request>", another one for each request; repeated, a request returns the rights
--         that it was given
--         least: fewest rights that are accepted instead of `count`
--         ttl_ms: how long its place in the queue is kept; 0: do not queue, leave the queue
--         lease_ms: the maker is dead after so long without a heartbeat
--         hold_ms: the rights are taken back after so long
--         incarnation: of the task that the client has opened
--         series: random name of the rights, if this call creates their counters
-- Returns {'granted', series, version or '', released, number ...}: the numbers of the rights; released: how
--         many groups may be begun beyond the bound, as all waited for each other
--       | {'wait', version or '', left, held, stored, trained, most, before, oldest ms, waiter or ''}
--         trained: for the next version; most: of groups begun and not trained; before: requests in the queue
--         before this one; oldest ms: for how long the oldest right, of this waiter, is held
--       | {'unset'}: the task has no groups_per_version yet; the maker is queued
--       | {'refused'}: the task has no max_staleness, or settings that groups_per_version excludes
--       | {'never', most}: `least` exceeds the bound
--       | {'gone'}: there is no such task, or it was created anew
--@include task clock facts waiters permissions

check_permissions(KEYS[1])
begin_writing()
local rule = rules()
if not rule.exists or rule.incarnation ~= ARGV[7] then
  return {'gone'}
elseif not rule.max_staleness or rule.max_reads ~= 1 or rule.capacity > 0 then
  return {'refused'}
end
local waiter, count, least = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local ttl_ms, now = tonumber(ARGV[4]), set_clock(tonumber(ARGV[5]))

local function queue()
  if ttl_ms > 0 then
    enqueue('#admission', waiter, least, ttl_ms, now)
  else
    dequeue('#admission', waiter)
  end
end

if not rule.groups_per_version then
  queue()
  return {'unset'}
end
--@include admission held_rights
local version = rule.version and string.format('%d', rule.version) or ''
redis.call('HSETNX', key('admission'), 'series', ARGV[8])
local given = rights_of(waiter, -1)
if #given > 0 then
  return {'granted', redis.call('HGET', key('admission'), 'series'), version, 0, unpack(given)}
elseif least > most_rights() then
  return {'never', most_rights()}
end
reclaim_rights(now)
local state = state_of_rights()
local left, released = allowed_rights(state, least, now)
local free = left >= least and left - reserved_before('#admission', waiter, now, left, least) or 0
if free < least then
  queue()
  wake_rights(now)
  local age = state.oldest_ms and math.max(now - state.oldest_ms, 0) or 0
  return {'wait', version, state.left, state.held, state.stored, math.floor(state.trained - state.mark),
    state.most, redis.call('ZCARD', key('queue', '#admission')), math.floor(age), state.oldest_waiter or ''}
end

local amount = math.min(count, free)
local first, rights, records, holders, holds = state.granted + 1, {}, {}, {}, {}
local record = string.format('%s %.17g %.0f %s', version == '' and '-' or version, state.mark, now, waiter)
local deadline = string.format('%.0f', now + tonumber(ARGV[6]))
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
redis.call('ZADD', key('makers'), string.format('%.0f', now + tonumber(ARGV[5])),
  string.match(waiter, '^[^/]+'))
dequeue('#admission', waiter)
wake_rights(now)
return {'granted', redis.call('HGET', key('admission'), 'series'), version, released, unpack(given)}
