-- End a lease, or a part of it.
-- KEYS[1] stream
-- ARGV    group, consumer, slot, token, outcome, reason, samples, ends, seq ...
--         outcome: ack | expire (done, as too stale) | release (back, unharmed) | fail (back, counts
--         as a failed delivery) | reject (to the dead-letter stream); ends is 1 when nothing of the
--         lease is left
-- Returns {'ok', entries} | {'lost'}; the same call again changes nothing and returns {'ok', 0}.
--@ _task _waiters _room _tags _index _groups _leases

begin_writing()
local group, consumer, slot, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local outcome, reason = ARGV[5], ARGV[6]
local held = redis.call('HGET', key('leases', group), slot)
if held == token .. ' ended' then
  return {'ok', 0}
elseif held ~= token then
  return {'lost'}
end

-- an entry that this lease gave back before, by a call that is repeated, may be another's by now
local function holds(seq)
  return #redis.call('XPENDING', stream, group, id_of(seq), id_of(seq), 1, slot) > 0
end

local state, seqs, ended = key('group', group), {}, 0
for i = 9, #ARGV do
  seqs[i - 8] = ARGV[i] -- as text: to write a number costs ten times as much
end
-- What may be read again waits again; returns the others, less those that an earlier call has ended
-- where it matters: they may wait again by now, or be history.
local function read_again()
  local told, over = rules(), {}
  if not told.indexed or told.max_reads == 1 and not keeps() then
    return seqs
  end
  for _, seq in ipairs(seqs) do
    local member = member_of(seq)
    local facts = holds(seq) and facts_of(member)
    if facts then
      facts[READS] = string.format('%d', tonumber(facts[READS]) + 1)
      redis.call('HSET', key('facts'), member, table.concat(facts, ' '))
      local reads = redis.call('HINCRBY', key('reads', group), member, 1)
      if told.max_reads == 0 or reads < told.max_reads then
        redis.call('XACK', stream, group, id_of(seq))
        redis.call('HDEL', key('deliveries', group), member)
        wait_again(group, seq)
        add(state, 'reads', 1)
      else
        over[#over + 1] = seq
      end
    end
  end
  return over
end

if outcome == 'ack' or outcome == 'expire' then
  local all = #seqs
  if outcome == 'ack' then
    seqs = read_again()
  end
  local again = all - #seqs
  for first = 1, #seqs, 1000 do
    local ids = {}
    for i = first, math.min(first + 999, #seqs) do
      ids[i - first + 1] = id_of(seqs[i])
    end
    ended = ended + redis.call('XACK', stream, group, unpack(ids))
  end
  if redis.call('EXISTS', key('deliveries', group)) == 1 then
    for _, seq in ipairs(seqs) do
      redis.call('HDEL', key('deliveries', group), member_of(seq))
    end
  end
  add(state, outcome == 'ack' and 'acked' or 'expired', ended)
  if ended + again > 0 and outcome == 'ack' then
    add(state, 'samples_acked', tonumber(ARGV[7]))
  end
  forget(group, seqs, outcome == 'ack')
  ended = ended + again
elseif outcome == 'reject' then
  for _, seq in ipairs(seqs) do
    local fields = fields_of(seq)
    if holds(seq) and redis.call('XACK', stream, group, id_of(seq)) == 1 then
      bury(group, seq, fields, reason, consumer)
      ended = ended + 1
    end
  end
  forget(group, seqs)
else
  for _, seq in ipairs(seqs) do
    if holds(seq) then
      ended = ended + return_lease(group, seq, outcome == 'fail', consumer)
    end
  end
end
if ARGV[8] == '1' then
  redis.call('HSET', key('leases', group), slot, token .. ' ended')
end
if redis.call('EXISTS', key('queue', '#room')) == 1 then
  wake('#room', room_left(), now_ms())
end
if rules().indexed then
  wake_pools(group, now_ms())
elseif redis.call('EXISTS', key('queue', group)) == 1 then
  wake_pool(group, now_ms())
end
return {'ok', ended}
