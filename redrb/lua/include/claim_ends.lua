-- Rows are removed, or lose columns: what the tasks know that claim them.
--@include task facts pools groups pending elsewhere claims consumption

-- Forget that rows have arrived for a task.
local function forget_arrival(name, size, numbered, seqs)
  for i, seq in ipairs(seqs) do
    local group = seq and size > 1 and math.floor((numbered[i] - 1) / size)
    if group and redis.call('HINCRBY', key('parts', name), group, -1) <= 0 then
      redis.call('HDEL', key('parts', name), group)
    end
  end
  in_parts('HDEL', key('claimed', name), numbered)
end

-- Rows are removed: what a task has acknowledged of them is noted in spent:<name> if they are `retained`.
local function forget_consumption(name, numbered, retained)
  local spent = {}
  for i, change in ipairs(retained and replies_of('ZMSCORE', key('consumed', name), numbered) or {}) do
    if change then
      spent[#spent + 1], spent[#spent + 2] = change, numbered[i]
    end
  end
  in_parts('ZADD', key('spent', name), spent)
  in_parts('ZREM', key('consumed', name), numbered)
end

-- End the groups of a task that rows belong to: waiting or leased, they count as evicted.
local function end_groups(name, claim, numbered)
  local seqs, ended, known = replies_of('HMGET', key('claimed', name), numbered), {}, {}
  for _, seq in ipairs(seqs) do
    if seq and seq ~= '' and not known[seq] then
      known[seq], ended[#ended + 1] = true, tonumber(seq)
    end
  end
  forget_arrival(name, claim.size, numbered, seqs)
  at_task(claiming(name), function()
    local over = {}
    for _, seq in ipairs(rules().exists and ended or {}) do
      local pool = waits_in(CLAIMER, seq)
      if pool then
        withdraw(CLAIMER, pool, {member_of(seq)})
      end
      if pool or is_leased(CLAIMER, seq) then
        over[#over + 1] = seq
      end
    end
    if #over > 0 then
      acknowledge(CLAIMER, over)
      add(key('group', CLAIMER), 'evicted', #over)
      forget(CLAIMER, over)
    end
  end)
end

-- Rows are removed: the groups that they belong to end.
local function end_claims(numbered, retained)
  for name, claim in pairs(claims()) do
    end_groups(name, claim, numbered)
    forget_consumption(name, numbered, retained)
  end
end

-- Rows have lost columns: groups of them that no task has acknowledged end.
local function end_unconsumed(numbered)
  for name, claim in pairs(claims()) do
    local left = {}
    for i, change in ipairs(replies_of('ZMSCORE', key('consumed', name), numbered)) do
      left[#left + 1] = not change and numbered[i] or nil
    end
    end_groups(name, claim, left)
  end
end
