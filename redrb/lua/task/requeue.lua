-- Let dead letters of a consumer group wait again there, each in its old place. A group that no other
-- consumer group needs has left the stream: it gets a new id, and sorts by its old arrival; stages know it by
-- its first id (include/dead_letters.lua). A claimed group whose rows were cleared ends as evicted.
-- KEYS[1] stream
-- ARGV    the call `Requeue` of redrb/stream/task/calls.py
-- Returns its reply; there is more if it has read its bytes of letters, or has removed entries of failed
--         transactions. Repeated, it requeues none again.
--@include task put_record facts pools history groups dead_letters puts waking consumption permissions

check_permissions(stream)
begin_writing()
local ask, letters, read, requeued = cmsgpack.unpack(ARGV[1]), {}, 0, 0
local group = ask.group
if not exists() then
  return cmsgpack.pack({found = 0})
end

-- Read the letters that can be requeued, up to a page of bytes. Returns whether there may be more.
local function read_letters()
  for _, seq in ipairs(ask.seqs) do
    local id = letter_id(group, seq)
    if id and not letters[id] then
      if read >= PAGE.copied_bytes then
        return true
      end
      local entry = redis.call('XRANGE', key('dead'), id, id)[1] or {id, {}}
      local letter, bytes = {id = id, seq = seq, stored = facts_of(member_of(seq))}, 0
      for at = 1, #entry[2], 2 do
        letter[entry[2][at]], bytes = entry[2][at + 1], bytes + #entry[2][at + 1]
      end
      if letter.status and (letter.stored or letter.g and letter.facts and letter.facts ~= '') then
        letters[#letters + 1], letters[id], read = letter, true, read + bytes
      end
    end
  end
  return false
end

-- Both orders if a letter has the score of a former one, and scripts cannot compute that of this one; or nil.
local function unsortable()
  --@include scores
  local order = rules().order
  if redis.call('HEXISTS', task, 'reordered') == 0 or scores_known(order) then
    return nil
  end
  for _, letter in ipairs(letters) do
    local former = letter.order or ''
    if former ~= order and not letter.stored then
      return {order, former}
    end
  end
end

local more = read_letters()
local refused = unsortable()
if refused then
  return cmsgpack.pack({unsortable = refused})
end
if remove_orphans(last_counted(), '+') then
  return cmsgpack.pack({more = true})
end

-- Store a group that is in the stream no more. Returns its new member and its facts.
local function store_again(letter, seq)
  local facts = unpack_facts(letter.facts)
  facts.status = letter.status
  --@include scores
  if redis.call('HEXISTS', task, 'reordered') == 1 and scores_known(rules().order) then
    facts.score = score_by(rules().order, facts)
  end
  if facts.score == '-arrival' then
    facts.score = -tonumber(seq)
  elseif not facts.score then
    facts.score = tonumber(seq)
  end
  local source = letter.source or seq
  local added = seq_of(redis.call('XADD', stream, '*', 'g', letter.g, 's', source))
  local member = member_of(added)
  redis.call('ZADD', key('buried'), source, member)
  redis.call('HSET', puts, 'last', string.format('%d', added))
  store_facts(member, facts)
  note_seq(group, added, facts)
  add(task, 'bytes', rules().max_bytes > 0 and facts.size or 0)
  local arrival = rules().order == 'fifo' and facts.score or seq
  redis.call('ZADD', key('behind'), arrival, member) -- it is evicted by its old arrival
  return member, facts
end

-- Let the entry of a letter be needed again, which other consumer groups need, or which is history.
local function need_again(letter, seq, facts)
  local member = member_of(seq)
  if redis.call('ZREM', key('archive'), member) == 1 then
    count_history({seq}, -1)
  end
  let_evict({seq})
  if letter.status ~= facts.status then
    redis.call('HSET', key('moved', group), member, letter.status)
  end
  return member, facts
end

-- Returns 1, or 0 if the group has ended.
local function requeue_letter(letter)
  local state = key('group', group)
  add(state, 'dead', -1)
  if not has_its_rows(group, letter.seq, letter.stored or unpack_facts(letter.facts)) then
    add(state, 'evicted', 1)
    delete_letter(letter.id, group)
    return 0
  end
  local member, facts
  if letter.stored then
    member, facts = need_again(letter, letter.seq, letter.stored)
  else
    member, facts = store_again(letter, letter.seq)
  end
  if letter.reads ~= '0' then
    redis.call('HSET', key('reads', group), member, letter.reads)
  end
  enter(group, pool_of(group, letter.status), {member}, {facts})
  return delete_letter(letter.id, group)
end

for _, letter in ipairs(letters) do
  requeued = requeued + requeue_letter(letter)
end
wake_entered()
return cmsgpack.pack({more = more, found = requeued})
